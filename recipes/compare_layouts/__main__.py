"""``python -m recipes.compare_layouts``."""

from common.output import run_command
from recipes.compare_layouts.command import main

if __name__ == "__main__":
    run_command(main, "compare_layouts")
