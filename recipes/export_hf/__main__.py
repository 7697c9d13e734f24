"""``python -m recipes.export_hf``."""

from common.output import run_command
from recipes.export_hf.export import main

if __name__ == "__main__":
    run_command(main, "export_hf")
