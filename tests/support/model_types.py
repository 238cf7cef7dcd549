"""Every model type of transformers, made small: attention of ours beside eager attention.

`python -m tests.support.model_types RESULTS [TYPE ...]` checks all types, or some, each in a
process of its own, and writes a line of JSON for each. Types in RESULTS are left out.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from attrs import asdict, frozen
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attn_graph.errors import GraphError
from attn_graph.integrations import transformers as integration

Config = Any  # of transformers
Model = Any  # of transformers
Named = dict[str, Tensor]
B, TOKENS, VOCABULARY = 2, 12, 99
MOST_PARAMETERS = 2e7
MOST_SECONDS, MOST_BYTES = 40, 3 << 30  # of a type, in a process of its own
TOLERANCE = 1e-8  # of float64, relative to the largest element; differences seen are below 1e-11
# Sizes by names of options: the first that fits, where the default is larger.
SIZES = (
    (r"vocab_size$|vocabulary_size$", VOCABULARY),
    (r"position_buckets|num_codebooks|n_mels|num_mel_bins|feature_size", 16),
    (r"moe_topk|experts_per_tok|index_topk|^top_k$", 2),
    (r"n_group$|topk_group$", 1),
    (r"experts$", 4),
    (r"key_value_heads$|kv_heads$|n_head_kv$", 2),
    (r"heads$|n_head$|attention_head$", 4),
    (r"block_size$", 4),
    (r"head_dim$|d_kv$|head_size$|d_head$|rotary_dim$", 8),
    (r"layers?$|depth$|num_blocks$", 2),
    (r"intermediate|ffn_dim|d_ff$|d_inner|n_inner|mlp_dim|feedforward|ffn_hidden", 48),
    (r"max_position|n_positions|max_source|max_target|max_sequence_length", 64),
    (r"lora_rank$", 16),
    (r"image_size$|img_size$", 32),
    (r"patch_size$", 8),
    (r"sliding_window|window_size|chunk_size$|attention_window", 6),
    (r"(hidden_size|d_model|embed_dim|n_embd|dim|embedding_size|width|d_embed|n_embed)$", 32),
)  # fmt: skip
GIVEN = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
GIVEN |= {"head_dim": 8}
RATES = r"dropout(_rate|_prob)?$|drop_path|layerdrop|_pdrop$"


@frozen
class Verdict:
    """A type's result: what became of it loaded with our attention, and with it set later.

    load, change: "equal", "refused: ...", "wrong: ...", "raised: ..."; "" if it could not be fed,
    for the reason in `unfed`. ours: calls of our attention, after `set_attn_implementation`.
    """

    kind: str
    model: str = ""
    inputs: str = ""
    load: str = ""
    change: str = ""
    ours: int = 0
    unfed: str = ""


class InDoubles(TorchFunctionMode):
    """Keeps float64 where models compute in float32, as in the softmax of eager attention."""

    def __torch_function__(
        self,
        func: Callable[..., Any],  # Any: whatever PyTorch's functions take and give
        types: Sequence[type],
        args: Sequence[Any] = (),  # Any: the same
        kwargs: Mapping[str, Any] | None = None,  # Any: the same
    ) -> Any:  # Any: the same
        kwargs = {**(kwargs or {})}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if x is torch.float32 else x for x in args]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def small(name: str, value: object) -> object:
    """An option's value, made small."""
    if name in GIVEN:
        return GIVEN[name]
    if isinstance(value, float) and re.search(RATES, name):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.search(r"token_(id|index)$|_id$", name):
        return min(value, VOCABULARY - 1)
    return min([value, *[size for rule, size in SIZES if re.search(rule, name)][:1]])


def shrink(config: type[Config]) -> Config:
    """A small config of a class, by its options."""
    options = {
        name: small(name, parameter.default)
        for name, parameter in inspect.signature(config.__init__).parameters.items()
        if parameter.default not in (None, inspect.Parameter.empty) or name in GIVEN
    }
    default = config()
    for name in config.sub_configs:
        if (part := getattr(default, name, None)) is not None:
            options[name] = shrink(type(part))
    if (
        "kv_lora_rank" in options and "num_key_value_heads" in options
    ):  # keys are made for all heads
        options["num_key_value_heads"] = options["num_attention_heads"]
    made = config(**options)
    if "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()):
        rope = made.rope_parameters
        half = int(8 * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return made


def shrink_made(config: type[Config]) -> Config:
    """The default config of a class, made small after it is made."""

    def change(made: Config) -> Config:
        for name, value in [*vars(made).items()]:
            if isinstance(value, hf.PreTrainedConfig):
                change(value)
            elif not name.startswith("_") and small(name, value) != value:
                setattr(made, name, small(name, value))
            elif name.endswith("layer_types") and isinstance(value, list):
                setattr(made, name, [*dict.fromkeys(value)][:2] * (1 + (len({*value}) == 1)))
        return made

    return change(config())


def models_of(kind: str) -> list[type[Model]]:
    """The classes of a type's models: those of the Auto classes, then others of its config."""
    names = [modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    names += [x for name, x in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    listed = [mapping.get(kind) for mapping in names]
    flat = [name for each in listed for name in ([each] if isinstance(each, str) else each or [])]
    config = CONFIG_MAPPING[kind]
    module = config.__module__.replace("configuration_", "modeling_")
    with suppress(ImportError):
        flat += [*vars(__import__(module, fromlist=["*"]))]
        homes = vars(sys.modules[module])
        made = [getattr(hf, name, homes.get(name)) for name in dict.fromkeys(flat)]
        return [x for x in made if isinstance(x, type) and reads(x, config)]
    return []


def reads(model: type, config: type[Config]) -> bool:
    """True for a class of models with configs of a class."""
    known = getattr(model, "config_class", None) is config
    return known and issubclass(model, hf.PreTrainedModel) and "PreTrained" not in model.__name__


def option(config: Config, *names: str, default: int) -> int:
    """The first option with one of the names, in a config or its parts."""
    parts = [config, *(x for x in vars(config).values() if isinstance(x, hf.PreTrainedConfig))]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int):
                return value
    return default


def draw_inputs(model: Model) -> Iterator[tuple[str, Named]]:
    """Inputs that a model may take, by a name of their kind: the first that run are right.

    Rows of tokens are padded, one at the start and one at the end.
    """
    config, takes = model.config, inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keep = torch.ones(B, TOKENS, dtype=torch.long)
    keep[0, :4], keep[1, -3:] = 0, 0
    ids = torch.randint(5, 90, (2, B, TOKENS), generator=generator)
    ids %= option(config, "vocab_size", default=90)
    words = {"input_ids": ids[0], "attention_mask": keep}
    answers = {"decoder_input_ids": ids[1], "decoder_attention_mask": keep.flip(0)}
    boxes = {"bbox": torch.tensor([1, 1, 9, 9]).expand(B, TOKENS, 4)}
    size, patch = option(config, "image_size", default=32), option(config, "patch_size", default=8)
    channels = option(config, "num_channels", "in_channels", "in_chans", default=3)
    width, frames = option(config, "hidden_size", "d_model", "embed_dim", default=32), 2 * TOKENS
    mels = option(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=128)
    flat = option(config, "patch_embed_hidden_size", default=32)
    patched = channels * patch**2 * option(config, "temporal_patch_size", default=1)
    heard = torch.ones(B, frames, dtype=torch.long)
    heard[0, -6:] = 0
    image = {"pixel_values": numbers(B, channels, size, size)}
    places = torch.arange(TOKENS).expand(B, TOKENS)[..., None].double()
    sound = torch.ones(B, 4000, dtype=torch.long)
    sound[0, -1200:] = 0
    whole = option(config, "max_source_positions", default=TOKENS)
    longest = {"input_features": numbers(B, mels, 2 * whole)}
    spectrum = {"input_features": numbers(B, frames, mels)}
    kinds: dict[str, Named] = {
        "words": words | boxes,
        "words and image": words | boxes | image,
        "image": image,
        "patches of images": {
            "hidden_states": numbers(32, patched), "grid_thw": torch.tensor([[1, 4, 4]] * 2),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        },
        "flat patches": {
            "flattened_patches": torch.cat((places, places, numbers(B, TOKENS, flat)), -1),
            "attention_mask": torch.ones(B, TOKENS, dtype=torch.long),
        },
        "spectrum": {**spectrum, "attention_mask": heard},
        "spectrum, mask of booleans": {**spectrum, "attention_mask": heard.bool()},
        "whole spectrum": longest,
        "sound": {"input_values": numbers(B, 4000), "attention_mask": sound},
        "sound alone": {"input_values": numbers(B, 4000)},
        "sound in a channel": {"input_values": numbers(B, 1, 4000)},
        "embeddings": {"inputs_embeds": numbers(B, TOKENS, width), "attention_mask": keep},
        "hidden states": {"hidden_states": numbers(B, TOKENS, width), "attention_mask": keep},
        "series": {"past_values": numbers(B, option(config, "context_length", default=32), 1)},
    }  # fmt: skip
    required = {
        name
        for name, x in takes.items()
        if x.default is x.empty and x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)
    }
    for name, inputs in kinds.items():
        given = {n: x for n, x in (inputs | answers).items() if n in takes}
        if required <= given.keys() and (next(iter(inputs)) in takes):
            yield name, given


def visible_rows(name: str, x: Tensor, inputs: Named) -> Tensor | None:
    """The rows of an output that are not padding; None if they are unknown."""
    kind = "" if "encoder" in name or "decoder_input_ids" not in inputs else "decoder_"
    keep = inputs.get(f"{kind}attention_mask")
    if keep is None:
        return x
    if x.shape[:2] == keep.shape:
        return x[keep.bool()]
    if x.ndim < 3 or len(x) != B:
        return None
    if {"inputs_embeds", "hidden_states"} & inputs.keys() and x.shape[1] > TOKENS:
        return x[:, :TOKENS][keep.bool()]  # tokens of the model's own follow
    return None if "input_ids" in inputs else x[:, : max(1, x.shape[1] // 2)]  # fewer frames


def results_of(model: Model, inputs: Named) -> Named:
    """A model's outputs, and the gradient of their weighted sum by each parameter, by name."""
    torch.manual_seed(3)
    more = (
        {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )
    with InDoubles():
        given = {n: x.clone() for n, x in inputs.items()}
        outputs = list_outputs(model(**given, **more))
    rows = {name: visible_rows(name, x, inputs) for name, x in outputs}
    results = {name: x for name, x in rows.items() if x is not None and x.numel()}
    if not results:
        raise ValueError(f"none of its outputs has rows: {[(n, [*x.shape]) for n, x in outputs]}")
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    generator = torch.Generator().manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for x in results.values():
        total = total + (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum()
    if total.requires_grad:
        grads = torch.autograd.grad(total, [*trained.values()], allow_unused=True)
        found = zip(trained, grads, strict=True)
        results |= {f"d {name}": x for name, x in found if x is not None}
    return {name: x.detach() for name, x in results.items()}


def list_outputs(outputs: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """The floating tensors of a model's outputs, by names."""
    if isinstance(outputs, Tensor):
        return [(name, outputs)] * outputs.is_floating_point()
    if isinstance(outputs, Mapping):
        left_out = {"past_key_values", "hidden_states", "attentions", "loss"}
        parts = {n: x for n, x in outputs.items() if n not in left_out}.items()
    elif isinstance(outputs, tuple | list):
        parts = {str(n): x for n, x in enumerate(outputs)}.items()
    else:
        return []
    return [each for n, x in parts for each in list_outputs(x, f"{name}.{n}")]


def difference(due: Named, results: Named) -> str:
    """What differs, with its size; "" if nothing does by more than TOLERANCE."""
    for name in due.keys() ^ results.keys():  # the gradient of an expert of padding alone is None
        if (due | results)[name].any():
            return f"{name} is on one side alone"
    due = {name: x for name, x in due.items() if x.numel() and name in results}
    largest = max((x.abs().max().item() for n, x in due.items() if n.startswith("d ")), default=0)
    for name, x in due.items():
        size = x.abs().max().item() if name[:2] != "d " else largest
        off = (results[name] - x).abs().max().item() / max(size, 1e-3)
        if not off < TOLERANCE:
            return f"{name} is off by {off:.1g} of {size:.3g}"
    return ""


def make(model: type[Model], shrinks: Callable[[type[Config]], Config]) -> Model:
    """A small model with random weights and eager attention, in float64."""
    config = shrinks(model.config_class)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        count = sum(x.numel() for x in model._from_config(deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"has {count:,} parameters")
    made = model._from_config(deepcopy(config)).double().eval()
    torch.manual_seed(0)
    for name, x in made.named_parameters():
        is_norm = x.ndim == 1 and name.endswith("weight")
        x.data = 0.2 * torch.randn(x.shape, dtype=torch.float64) + is_norm
    with suppress(ValueError, AttributeError):
        made.set_experts_implementation("eager")  # of all, the one in float64
    return made


def copy(eager: Model, **options: Any) -> Model:
    """The same model, made anew with options."""
    made = type(eager)._from_config(deepcopy(eager.config), **options).double().eval()
    made.load_state_dict(eager.state_dict())
    for x, due in zip(made.buffers(), eager.buffers(), strict=True):
        x.data = due.data.clone()
    with suppress(ValueError, AttributeError):
        made.set_experts_implementation("eager")
    return made


def load(eager: Model) -> Model:
    """The same model, loaded with our attention."""
    return copy(eager, attn_implementation="attn_graph")


def change(eager: Model) -> Model:
    """The same model, with our attention set."""
    made = copy(eager)
    made.set_attn_implementation("attn_graph")
    return made


def judge(way: Callable[[Model], Model], eager: Model, inputs: Named, due: Named) -> str:
    """What becomes of a model with our attention: see `Verdict`."""
    try:
        off = difference(due, results_of(way(eager), inputs))
    except GraphError as error:
        return f"refused: {error}"
    except Exception as error:  # any is a verdict
        return f"raised: {type(error).__name__}: {error}"[:500]
    return f"wrong: {off}" if off else "equal"


def feed(kind: str) -> tuple[Model, str, Named, Named]:
    """The first model of a type that runs with eager attention: the model, the name of its inputs,
    the inputs, and the results. Raises ValueError if none does, with all reasons."""
    reasons: list[str] = []
    for model in models_of(kind)[:6]:
        for shrinks in (shrink, shrink_made):
            try:
                eager = make(model, shrinks)
                for name, inputs in draw_inputs(eager):
                    try:
                        due = results_of(eager, inputs)
                    except Exception as error:  # other inputs may do
                        reasons.append(f"{model.__name__}, {name}: {error}"[:200])
                        continue
                    if not any(x.isnan().any() for x in due.values()):
                        return eager, name, inputs, due
                    reasons.append(f"{model.__name__}, {name}: NaN with eager attention")
            except Exception as error:  # another class, or another config, may do
                reasons.append(f"{model.__name__}: {type(error).__name__}: {error}"[:200])
    raise ValueError(" | ".join(reasons) or "transformers has no class of models")


def check_type(kind: str) -> Verdict:
    """A type's verdict."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return check_in_doubles(kind)
    finally:
        torch.set_default_dtype(usual)


def check_in_doubles(kind: str) -> Verdict:
    try:
        eager, name, inputs, due = feed(kind)
    except ValueError as error:
        return Verdict(kind, unfed=str(error))
    loaded = judge(load, eager, inputs, due)
    calls = Counter[str]()

    def attend(*args: Any, **kwargs: Any) -> Any:  # Any: of a layer
        calls["ours"] += 1
        return integration.attend_layer(*args, **kwargs)

    hf.AttentionInterface.register(integration.NAME, attend)
    try:
        changed = judge(change, eager, inputs, due)
    finally:
        hf.AttentionInterface.register(integration.NAME, integration.attend_layer)
    return Verdict(kind, type(eager).__name__, name, loaded, changed, calls["ours"])


def check_alone(kind: str, path: Path) -> None:
    """Check a type in this process, and write a line."""
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    signal.alarm(MOST_SECONDS)
    write(path, check_type(kind))


def write(path: Path, verdict: Verdict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(verdict)) + "\n")


def read(path: Path) -> list[Verdict]:
    if not path.exists():
        return []
    return [Verdict(**json.loads(line)) for line in path.read_text().splitlines()]


def count(verdicts: Sequence[Verdict]) -> Counter[str]:
    """Types by what became of them, in both ways."""
    counts = Counter[str]()
    for each in verdicts:
        for way, result in (("loaded", each.load), ("set", each.change)):
            counts[f"{way}: {result.partition(':')[0] or 'not fed'}"] += 1
    return counts


def main(results: str, *kinds: str) -> None:
    path = Path(results)
    done = {each.kind for each in read(path)}
    for kind in [x for x in kinds or CONFIG_MAPPING if x not in done]:
        process = multiprocessing.get_context("fork").Process(target=check_alone, args=(kind, path))
        process.start()
        process.join()
        if process.exitcode:
            write(path, Verdict(kind, unfed=f"its process ended with {process.exitcode}"))
    verdicts = read(path)
    for each in verdicts:
        if any(x.startswith(("wrong", "raised")) for x in (each.load, each.change)):
            print(each)
    print(*sorted(count(verdicts).items()), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
