"""Print text that a trained model continues, with transformers' generate.

    python -m recipes.generate runs/debug --prompt "def main"
    torchrun --nproc-per-node 8 -m recipes.generate runs/llama3_8b

The weights are sharded over the processes with FSDP2, so that a model too large for one device
can speak. All processes draw the same tokens, and rank 0 prints. Exit codes: 0 printed, 2 bad
input.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.output import run_command
from models.config import LlamaConfig
from models.hf_config import hf_config
from parallel.launch import Launch, read_launch
from parallel.layout import Layout
from recipes.export_hf.checkpoint import (
    check_checksums,
    check_parameters,
    load_tensors,
    make_parser,
    open_checkpoint,
)
from recipes.export_hf.checks import build_transformers_model
from recipes.export_hf.tokenizer import load_checkpoint_tokenizer, read_generation
from training.config.command_line import positive
from training.start import refuse

if TYPE_CHECKING:
    from parallel.mesh import Ranks

COMM_TIMEOUT_S = 600.0


def load_model(checkpoint: Path, config: LlamaConfig, described: dict, ranks: "Ranks"):
    """transformers' Llama with the weights of a checkpoint, sharded over all ranks.

    Args:
        described: the model's config.json.
    """
    from torch.distributed.fsdp import fully_shard

    check_parameters(checkpoint, config)
    model = build_transformers_model(config, described)
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks.mesh["dp"])
    fully_shard(model, mesh=ranks.mesh["dp"])
    model.to_empty(device=ranks.device)
    # to_empty leaves the rotary frequencies uninitialised, and no checkpoint holds them.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(ranks.device)
    parameters = dict(model.named_parameters())
    tensors = {name: parameter.detach() for name, parameter in parameters.items()}
    load_tensors(checkpoint, tensors, process_group=ranks.control)
    return model.eval()


def _of_rank_0(_, logits):
    """Logits [1, V] of the next token, broadcast from rank 0.

    With logits that differ in the last bit, ranks would draw other tokens, end at other lengths,
    and then wait for each other.
    """
    import torch.distributed as dist

    logits = logits.contiguous()
    dist.broadcast(logits, 0)
    return logits


def generate(path: Path, launch: Launch, options: argparse.Namespace) -> list[int]:
    """The ids of the prompt and of its continuation, the same on all ranks.

    The prompt follows an EOS, as the documents of the training do.

    Args:
        path: a run directory, or a checkpoint.
        options: ``prompt``, ``max_new_tokens``, ``temperature`` and ``seed``.

    Raises:
        ConfigError: in one line.
    """
    checkpoint, identity, config = open_checkpoint(path)
    check_checksums(checkpoint, launch)

    import torch
    import torch.distributed as dist

    from parallel.mesh import init_ranks

    tokenizer = load_checkpoint_tokenizer(checkpoint, identity, options.tokenizer)
    ids = [tokenizer.eos_id, *tokenizer.encode([options.prompt])[0]]
    described = hf_config(
        config,
        seq_len=identity["seq_len"],
        dtype=identity["dtype"],
        bos_token_id=None,
        eos_token_id=read_generation(checkpoint, tokenizer)["eos_token_id"],
    )
    layout = Layout(dp=launch.world_size, tp=1, micro_batch_size=1, micro_batches=1)
    ranks = init_ranks(launch, layout, COMM_TIMEOUT_S)
    try:
        model = load_model(checkpoint, config, described, ranks)
        inputs = torch.tensor([ids], device=ranks.device)
        sampling = {"do_sample": False}
        if options.temperature:
            # Draw from the whole distribution: the default of transformers is its top 50 tokens.
            sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0}
        torch.manual_seed(options.seed)
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=options.max_new_tokens,
            pad_token_id=tokenizer.eos_id,
            logits_processor=[_of_rank_0],
            **sampling,
        )[0].tolist()
        if launch.rank == 0:
            print(tokenizer.decode(output[1:]))
        dist.barrier(ranks.control)  # a rank that leaves closes its connections on the others
    finally:
        dist.destroy_process_group()
    return output


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def parse_command(argv: list[str]) -> argparse.Namespace:
    """The options of a command line.

    Raises:
        ConfigError: in one line. SystemExit: with 0, for --help.
    """
    parser = make_parser("generate", __doc__)
    add = parser.add_argument
    add(
        "--prompt",
        default="",
        metavar="TEXT",
        help="how the text starts, after the EOS that the documents of the training start after; a "
        "special token that is spelled here is its letters (default: nothing)",
    )
    text = "tokens after the prompt, unless the text ends before (default: 64)"
    add("--max-new-tokens", type=positive, default=64, metavar="N", help=text)
    text = "0 takes the likeliest token each time, 1 draws as the model says (default: 0.8)"
    add("--temperature", type=_temperature, default=0.8, metavar="T", help=text)
    add("--seed", type=_whole, default=0, help="seed of the draws (default: 0)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code, where it was not refused."""
    launch = Launch(0, 1, 0, 1)
    try:
        launch = read_launch()
        options = parse_command(sys.argv[1:] if argv is None else argv)
        generate(options.path, launch, options)
    except ConfigError as error:
        refuse(str(error), launch, "generate")
    return 0


if __name__ == "__main__":
    run_command(main, "generate")
