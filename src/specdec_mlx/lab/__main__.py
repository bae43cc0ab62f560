"""`python -m specdec_mlx.lab target` prints the target's folder, `draft` the drafter's."""

import argparse

from specdec_mlx.lab.pair import draft_path, target_path


def main() -> None:
    """Print one of the two folders."""
    parser = argparse.ArgumentParser(prog="python -m specdec_mlx.lab", description=__doc__)
    parser.add_argument("which", choices=["target", "draft"])
    print(target_path() if parser.parse_args().which == "target" else draft_path())


if __name__ == "__main__":
    main()
