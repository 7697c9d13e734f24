"""What must hold of an exported model, before and after its files are written."""

from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.text import printable
from models.config import LlamaConfig
from models.hf import few, list_tensors
from models.hf_config import parse_hf_config, read_hf_config
from training.data.sources import one_line

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# safetensors' names of the dtypes that can be written.
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
Shapes = dict[str, tuple[int, ...]]


def compare_shapes(what: str, shapes: Shapes, expected: Shapes, whose: str) -> None:
    """Check that the parameters of ``what`` are, by name and shape, those that ``whose`` expects.

    Raises:
        ConfigError: naming some that differ.
    """
    faults = [f"{name} {list(shapes[name])}" for name in shapes if name not in expected]
    faults += [f"no {name}" for name in expected if name not in shapes]
    faults += [
        f"{name} {list(shapes[name])} for {list(expected[name])}"
        for name in shapes.keys() & expected.keys()
        if shapes[name] != expected[name]
    ]
    if faults:
        raise ConfigError(f"{what} is not what {whose} takes: it has {few(faults)}")


def build_transformers_model(config: LlamaConfig, described: dict) -> "LlamaForCausalLM":
    """transformers' Llama of a config.json, on the meta device, with exactly our parameters.

    Args:
        described: the content of config.json.

    Raises:
        ConfigError: if transformers refuses the config, or names or shapes differ.
    """
    import torch
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    try:
        hf = HFConfig.from_dict(described)
        with torch.device("meta"):
            model = LlamaForCausalLM(hf).to(hf.dtype)
    except Exception as error:  # the validation of transformers raises nearly every type
        raise ConfigError(
            f"transformers refuses the config of this model ({type(error).__name__}: "
            f"{' '.join(str(error).split())}): it cannot be used there"
        ) from None
    # The first name of each parameter: tied ones are one object, and in the files once.
    parameters = model.state_dict(keep_vars=True)
    names = {id(parameter): name for name, parameter in reversed(parameters.items())}
    shapes = {name: tuple(parameters[name].shape) for name in names.values()}
    compare_shapes("the model", config.parameter_shapes, shapes, "transformers' LlamaForCausalLM")
    return model


def check_config(config: LlamaConfig, described: dict) -> None:
    """Check that config.json, of content ``described``, says all of ``config``.

    Raises:
        ConfigError: naming the first field that would be lost.
    """
    try:
        stated, assumed = parse_hf_config(described)
        read = LlamaConfig(**stated, **assumed)
    except ValueError as error:
        raise ConfigError(f"the config.json of this model cannot be read: {error}") from None
    # config.json states what follows from other fields, too, and may raise the longest sequence.
    derived = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size}
    derived["max_position_embeddings"] = read.max_position_embeddings
    for name in LlamaConfig.model_fields:
        value = derived.get(name, getattr(config, name))
        if value != getattr(read, name):
            raise ConfigError(
                f"{name} of this model is {value} and would be {getattr(read, name)} in "
                "transformers: config.json does not say it"
            )


def check_written(folder: Path, config: LlamaConfig, dtype: str, plan: dict[str, str]) -> None:
    """Check the headers and the config.json in ``folder`` against what was to be written.

    Args:
        plan: name of a tensor to the name of its file.

    Raises:
        ConfigError: if they differ.
    """
    shapes, code = config.parameter_shapes, DTYPES[dtype]
    try:
        written = list_tensors(folder)
        read_hf_config(folder)
    except ValueError as error:
        raise ConfigError(f"what was written is damaged ({one_line(error)}): try again") from None
    expected = {name: (folder / file, shapes[name], code) for name, file in plan.items()}
    for name in expected | written:
        if written.get(name) != expected.get(name):
            raise ConfigError(
                f"what was written is damaged ({printable(name)} is {written.get(name)} and not "
                f"{expected.get(name)}): try again"
            )
