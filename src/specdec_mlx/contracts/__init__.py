"""The contracts between the parts: what a drafter hands over, what a rule returns.

K is the number of draft tokens in a round and V the target's vocabulary size. Who writes a drafter
needs `Drafter`, `DraftSession` and `Draft`; who writes a rule, `AcceptanceRule`, `TargetRows` and
`Verdict`; what either may add stands in `optional`.
"""

from specdec_mlx.contracts.branching import DraftLength as DraftLength
from specdec_mlx.contracts.branching import OffersSeveral as OffersSeveral
from specdec_mlx.contracts.branching import ValuesDrafts as ValuesDrafts
from specdec_mlx.contracts.drafting import NO_DRAFT as NO_DRAFT
from specdec_mlx.contracts.drafting import ROOT as ROOT
from specdec_mlx.contracts.drafting import Draft as Draft
from specdec_mlx.contracts.drafting import DraftContext as DraftContext
from specdec_mlx.contracts.drafting import Drafter as Drafter
from specdec_mlx.contracts.drafting import DraftSession as DraftSession
from specdec_mlx.contracts.drafting import Evidence as Evidence
from specdec_mlx.contracts.drafting import GoesOn as GoesOn
from specdec_mlx.contracts.drafting import LogitsProcessor as LogitsProcessor
from specdec_mlx.contracts.drafting import Origin as Origin
from specdec_mlx.contracts.drafting import RoundRecord as RoundRecord
from specdec_mlx.contracts.drafting import Session as Session
from specdec_mlx.contracts.drafting import SessionGroups as SessionGroups
from specdec_mlx.contracts.drafting import Step as Step
from specdec_mlx.contracts.optional import MANY_WAITING as MANY_WAITING
from specdec_mlx.contracts.optional import MOST_WAITING as MOST_WAITING
from specdec_mlx.contracts.optional import Checks as Checks
from specdec_mlx.contracts.optional import Closes as Closes
from specdec_mlx.contracts.optional import ReadsTarget as ReadsTarget
from specdec_mlx.contracts.optional import SeesTarget as SeesTarget
from specdec_mlx.contracts.optional import Stepwise as Stepwise
from specdec_mlx.contracts.optional import all_drafters as all_drafters
from specdec_mlx.contracts.optional import is_cheap as is_cheap
from specdec_mlx.contracts.optional import key_of as key_of
from specdec_mlx.contracts.optional import models_of as models_of
from specdec_mlx.contracts.optional import optional as optional
from specdec_mlx.contracts.optional import session_groups as session_groups
from specdec_mlx.contracts.optional import session_parts as session_parts
from specdec_mlx.contracts.target import FeatureRows as FeatureRows
from specdec_mlx.contracts.target import Features as Features
from specdec_mlx.contracts.target import KeysValues as KeysValues
from specdec_mlx.contracts.target import PendingPass as PendingPass
from specdec_mlx.contracts.target import ReadsCache as ReadsCache
from specdec_mlx.contracts.target import Tappable as Tappable
from specdec_mlx.contracts.target import Target as Target
from specdec_mlx.contracts.verdicts import AcceptanceRule as AcceptanceRule
from specdec_mlx.contracts.verdicts import Agreement as Agreement
from specdec_mlx.contracts.verdicts import Decision as Decision
from specdec_mlx.contracts.verdicts import Outcome as Outcome
from specdec_mlx.contracts.verdicts import Randomness as Randomness
from specdec_mlx.contracts.verdicts import TargetRows as TargetRows
from specdec_mlx.contracts.verdicts import TreeVerdict as TreeVerdict
from specdec_mlx.contracts.verdicts import Verdict as Verdict
from specdec_mlx.contracts.verdicts import needs_distribution as needs_distribution
from specdec_mlx.contracts.verdicts import rule_for as rule_for
from specdec_mlx.contracts.verdicts import shares_noise as shares_noise
