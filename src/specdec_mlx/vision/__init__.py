"""Vision models of mlx-vlm: a prompt with images, and then speculation on the language model."""

from specdec_mlx.vision.model import VisionModel as VisionModel
from specdec_mlx.vision.prompts import generate as generate
from specdec_mlx.vision.prompts import load as load
from specdec_mlx.vision.prompts import read_prompt as read_prompt
from specdec_mlx.vision.prompts import stream_generate as stream_generate
