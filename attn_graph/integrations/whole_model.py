"""A model before it runs: the attention of its layers, and its memory, from its config alone."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from inspect import signature
from json import loads
from pathlib import Path
from typing import Any, final, get_args

import torch
import transformers
from attrs import evolve, frozen
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from attn_graph.compiler import explain
from attn_graph.errors import GraphError, show
from attn_graph.instruments.explanation import Explanation
from attn_graph.integrations.model_figures import (
    Division,
    LayerKind,
    ModelExplanation,
    Phase,
    is_untold,
)
from attn_graph.ir.graph import Graph
from attn_graph.lowering.backend import UNPRICED
from attn_graph.lowering.request import Options as PlanOptions
from attn_graph.lowering.request import Request
from attn_graph.machine.sizes import format_bytes, parse_bytes
from attn_graph.machine.target import Target, default_target
from attn_graph.mesh.explanation import link_speed, predict_ranks
from attn_graph.mesh.layout import Mesh
from attn_graph.mesh.results import Outlook
from attn_graph.mesh.sharding import shard
from attn_graph.nn.calls import Options, make_graph, named_options
from attn_graph.planner.choose import price_all
from attn_graph.printing.words import nearest
from attn_graph.spec import TensorSpec

NAME = "attn_graph"
MOST_ANSWERS = 40  # of one search; a size that grows evenly takes four
MOST_SIZE = 2**24  # of a batch, and of a context without a limit in its config
RESERVE = "1GiB"
# The axis of a weight that transformers' styles of tensor parallelism divide. Weights whose results
# are gathered stay whole here, and so count too much.
AXES = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "embedding_rowwise": -2}


@final
@frozen
class LayerCall:
    """A call of a layer's attention. storages: the memory of its keys and values, as long as it
    lives."""

    module: torch.nn.Module
    graph: Graph
    device: torch.device
    storages: tuple[weakref.ref[torch.UntypedStorage], ...]


layer_calls: ContextVar[list[LayerCall] | None]  # while layers are explained
layer_calls = ContextVar("layer_calls", default=None)


def note_call(module: torch.nn.Module, tensors: Mapping[str, Tensor], options: Options) -> None:
    """Keep the graph of a layer, while layers are explained."""
    if is_dynamo_compiling() or (calls := layer_calls.get()) is None:
        return
    specs = {name: TensorSpec.like(x) for name, x in tensors.items()}
    storages = tuple(weakref.ref(tensors[name].untyped_storage()) for name in "kv")
    graph = make_graph(specs, named_options(options))
    calls.append(LayerCall(module, graph, tensors["q"].device, storages))


@contextmanager
def noting_calls() -> Iterator[list[LayerCall]]:
    """A block that keeps the calls of its layers."""
    calls: list[LayerCall] = []
    token = layer_calls.set(calls)
    try:
        yield calls
    finally:
        layer_calls.reset(token)


def explain_layers(
    model: torch.nn.Module,
    /,
    target: Target | str | None = None,
    **inputs: Any,  # Any: what the model takes
) -> dict[str, Explanation]:
    """The explanation of each layer's attention, by the layer's name: see `attn_graph.explain`.

    The model is called with `inputs` once, without gradients, on its device. target: another
    machine to explain for; the model's by default. Layers without attention of ours are left out.
    Raises GraphError if none is left.
    """
    with torch.no_grad(), noting_calls() as calls:
        model(**inputs)
    if not calls:
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        raise GraphError(
            f"explain_layers: no layer of {type(model).__name__} calls {NAME}; its attention is "
            f"{implementation!r}. Call model.set_attn_implementation({NAME!r}) first. Where that "
            "is refused, the model has no attention interface; if it calls PyTorch's "
            "scaled_dot_product_attention, call it in a block of "
            "attn_graph.replace_sdpa(report=True)"
        )
    last = {call.module: call for call in calls}
    return {
        name: explain(last[module].graph, target=target or default_target(last[module].device))
        for name, module in model.named_modules()
        if module in last
    }


class Rehearsal(TorchDispatchMode):
    """Counts bytes of tensors on the meta device, by their storages, while they live.

    now, most: of all but `apart`. If a model reads whether all or any elements of a tensor have a
    property, all have and none has: no padding, one document a row, no overflow. Any other number
    that a model reads raises GraphError, since there is none.
    """

    def __init__(self, apart: Iterable[Tensor], held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.now = self.most = 0
        self.known = {x.untyped_storage()._cdata for x in apart}
        self.answers: dict[int, bool] = {}
        self.count(held)

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of new tensors until they are freed."""
        for x in tensors:
            storage = x.untyped_storage()
            if x.is_meta and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.release, storage._cdata, storage.nbytes())

    def release(self, key: int, count: int) -> None:
        """Count a storage no longer."""
        self.known.discard(key)
        self.answers.pop(key, None)
        self.now -= count

    def __torch_dispatch__(
        self,
        func: Any,  # Any: PyTorch's operators, and what they take and give
        types: Sequence[type],
        args: Sequence[Any] = (),  # Any: the same
        kwargs: Mapping[str, Any] | None = None,  # Any: the same
    ) -> Any:  # Any: the same
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self.answer(args[0])
        result = func(*args, **(kwargs or {}))
        self.count(x for x in tree_leaves(result) if isinstance(x, Tensor))
        if func.overloadpacket in (torch.ops.aten.all, torch.ops.aten.any):
            holds = func.overloadpacket is torch.ops.aten.all
            self.answers[result.untyped_storage()._cdata] = holds
        return result

    def answer(self, tensor: Tensor) -> bool:
        """The answer of all or any. Raises GraphError for other numbers."""
        key = tensor.untyped_storage()._cdata
        if key not in self.answers:
            raise GraphError(
                "explain_model: the model reads a number off a tensor, to decide what to compute, "
                "and without data there is none; load it and call explain_layers"
            )
        return self.answers.pop(key)


Layers = tuple[tuple[tuple[Tensor, ...], ...], ...]


@final
@frozen
class CacheBytes:
    """Bytes of a cache's tensors, and of the memory held by them: more if they are slices."""

    needed: int = 0
    held: int = 0

    @classmethod
    def of(cls, cache: Layers) -> CacheBytes:
        """The bytes of the layers' tensors."""
        tensors = [x for part in cache for layer in part for x in layer]
        return cls(sum(x.nbytes for x in tensors), sum_storages(tensors))


@final
@frozen(eq=False)
class TrialRun:
    """A run of the model at one size. cache: the layers' tensors after it, of each of its parts.

    tensors: the most bytes at one time. saved: between forward and backward. before: the cache at
    the start of a step.
    """

    calls: tuple[LayerCall, ...]
    tensors: int
    saved: int = 0
    cache: Layers = ()
    before: CacheBytes = CacheBytes()

    def tensors_of(self, call: LayerCall) -> Iterator[Tensor]:
        """The tensors of a call's layer in the cache. An encoder's and decoder's has two parts: the
        layer reads one of them in place."""
        index = getattr(call.module, "layer_idx", None)
        own = [part[index] for part in self.cache if index is not None and index < len(part)]
        read = {x._cdata for ref in call.storages if (x := ref()) is not None}
        for layer in own:
            if len(own) == 1 or any(x.untyped_storage()._cdata in read for x in layer):
                yield from layer


@final
@frozen(eq=False)
class Paper:
    """A model without memory, on the meta device, and a target to explain it for."""

    model: PreTrainedModel
    target: Target
    phase: Phase
    reserve: int
    gpus: int
    divide: Division
    link: str | float | None

    @cached_property
    def names(self) -> dict[torch.nn.Module, str]:
        """The names of its modules."""
        return {module: name for name, module in self.model.named_modules()}

    @cached_property
    def weights(self) -> list[Tensor]:
        """Parameters and buffers, each once."""
        return [*self.model.parameters(), *self.model.buffers()]

    @cached_property
    def optimizer(self) -> torch.optim.AdamW | None:
        """AdamW after its first step, in training."""
        if self.phase != "train":
            return None
        weights = [x for x in self.model.parameters() if x.requires_grad]
        optimizer = torch.optim.AdamW(weights, foreach=True)  # as on GPUs
        for x in weights:
            x.grad = torch.empty_like(x)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    @property
    def states(self) -> list[Tensor]:
        """The optimizer's state on the device."""
        kept = tree_leaves([*self.optimizer.state.values()]) if self.optimizer else []
        return [x for x in kept if isinstance(x, Tensor) and x.is_meta]

    def explain(self, batch: int, context: int) -> ModelExplanation:
        """The explanation at one size. A divided context is run whole too, for its layers."""
        shares = self.gpus > 1 and self.divide == "context"
        trial = self.rehearse(batch, -(-context // self.gpus) if shares else context)
        whole = self.rehearse(batch, context) if shares else trial
        return ModelExplanation(
            type(self.model).__name__, self.target, self.phase, batch, context,
            weights=sum_storages(self.weights), cache=CacheBytes.of(trial.cache).held,
            saved=trial.saved, optimizer=sum_storages(self.states), tensors=trial.tensors,
            reserve=self.reserve,
            kinds=tuple(self.kinds(whole, trial, shares)), gpus=self.gpus, divide=self.divide,
            notes=tuple(notes_of_cache(trial)),
        )  # fmt: skip

    def kinds(self, whole: TrialRun, trial: TrialRun, shares: bool) -> Iterator[LayerKind]:
        """The kinds of layers, in the order of their first calls. trial: for what one GPU keeps."""
        groups: dict[Graph, list[tuple[LayerCall, LayerCall]]] = {}
        for calls in zip(whole.calls, trial.calls, strict=True):
            groups.setdefault(calls[0].graph, []).append(calls)
        for graph, both in groups.items():
            wants = None if self.phase == "train" else ()
            explanation = explain(graph, target=self.target, gradients=wants)
            outlook = None
            if shares:
                divided = shard(graph, Mesh(self.gpus), "balanced")
                outlook = explain(divided, target=self.target, link=self.link)
            seconds = predict(explanation, outlook)
            yield LayerKind(
                tuple(self.names[call.module] for call, _ in both),
                explanation,
                None if seconds is None else len(both) * seconds,
                sum_storages(x for _, call in both for x in trial.tensors_of(call)),
                outlook,
                both[0][1].graph if shares else None,
            )

    def rehearse(self, batch: int, context: int) -> TrialRun:
        """Run the phase once, without data."""
        self.model.train(self.phase == "train")
        run = self.train if self.phase == "train" else self.infer
        return run(batch, context)

    def train(self, batch: int, context: int) -> TrialRun:
        """A step of training: forward, backward, and the optimizer's."""
        assert self.optimizer is not None
        given = self.tokens(batch, context)
        labels = {"labels": token_ids(batch, context)}
        whole = Rehearsal((*self.weights, *self.states), (*given.values(), *labels.values()))
        with whole, noting_calls() as calls:
            loss = self.model(**given, **labels, **self.only("use_cache", False)).loss
            saved = whole.now
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
        return TrialRun(tuple(calls), whole.most, saved)

    def infer(self, batch: int, context: int) -> TrialRun:
        """The prompt of `context` tokens, or the step of the last of them."""
        before, given = None, self.tokens(batch, context)
        if self.phase == "decode":
            before = self.remember(batch, context - 1)
            given = self.tokens(batch, 1)
            if self.model.config.is_encoder_decoder:
                del given["input_ids"]
                given["encoder_outputs"] = (before.encoder_last_hidden_state,)
            given["past_key_values"] = before.past_key_values
        layers = cache_layers(given.get("past_key_values"))
        held = tree_leaves([[*given.values()], layers])
        whole = Rehearsal(self.weights, (x for x in held if isinstance(x, Tensor)))
        kept = CacheBytes.of(layers)
        del before, held, layers
        with whole, torch.no_grad(), noting_calls() as calls:
            out = self.model(**given, **self.choices)
        layers = cache_layers(out.get("past_key_values"))
        return TrialRun(tuple(calls), whole.most, cache=layers, before=kept)

    def remember(self, batch: int, context: int) -> Any:  # Any: a model's output
        """The output of a model for a prompt, with its cache. Raises GraphError without one."""
        if context < 1:
            raise GraphError(
                "explain_model: context 1 has no keys before the step; a step of decode needs 2"
            )
        with Rehearsal(self.weights, ()), torch.no_grad():
            out = self.model(**self.tokens(batch, context), **self.choices)
        if out.get("past_key_values") is None:
            raise GraphError(
                f"explain_model: {type(self.model).__name__} keeps no cache of keys, so it has no "
                "phase 'decode'; write phase='prefill'"
            )
        return out

    @cached_property
    def choices(self) -> dict[str, Any]:  # Any: what models take
        """A cache, and the logits of the last token, as `generate` calls a model."""
        return self.only("use_cache", True) | self.only("logits_to_keep", 1)

    def only(self, name: str, value: object) -> dict[str, Any]:  # Any: what models take
        """An option, if the model's call has it."""
        return {name: value} if name in signature(type(self.model).forward).parameters else {}

    def tokens(self, batch: int, count: int) -> dict[str, Any]:  # Any: what models take
        """The inputs of a model that reads tokens."""
        names = ["input_ids"]
        names += ["decoder_input_ids"] if self.model.config.is_encoder_decoder else []
        return {name: token_ids(batch, count) for name in names}


def token_ids(batch: int, count: int) -> Tensor:
    return torch.zeros(batch, count, dtype=torch.long, device="meta")


def sum_storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, each once."""
    return sum({x._cdata: x.nbytes() for x in map(Tensor.untyped_storage, tensors)}.values())


def cache_layers(cache: Any) -> Layers:  # Any: a cache of transformers, or None
    """The tensors of each layer in a cache, of an encoder's and decoder's in both parts."""
    parts = [getattr(cache, x, None) for x in ("self_attention_cache", "cross_attention_cache")]
    caches = [x for x in parts if x is not None] or [cache]
    return tuple(
        tuple(
            tuple(x for x in tree_leaves([*vars(layer).values()]) if isinstance(x, Tensor))
            for layer in getattr(each, "layers", ())
        )
        for each in caches
    )


def notes_of_cache(trial: TrialRun) -> Iterator[str]:
    """Notes of a cache of slices: after a prompt, or before a step."""
    after, before = CacheBytes.of(trial.cache), trial.before
    if after.needed < after.held and not before.held:
        yield (
            f"the cache needs {format_bytes(after.needed)}, and holds the memory of the whole "
            f"prompt, {format_bytes(after.held)}, until the next step: its tensors are slices"
        )
    if before.needed < before.held:
        spare = format_bytes(before.held - before.needed)
        yield (
            "this is the first step after the prompt: the cache that it reads holds the memory of "
            f"the whole prompt, {format_bytes(before.held)}, because its tensors are slices; later "
            f"steps need up to {spare} less"
        )


def predict(explanation: Explanation, outlook: Outlook | None) -> float | None:
    """The seconds of a layer, by the prices of its backends; None if not known.

    outlook: of a divided context, whose slowest GPU is the layer's.
    """
    if explanation.target.kind == "cpu":  # its prices are of one thread
        return None
    passes = [explanation, *filter(None, [explanation.backward])]
    prices = [price_all(Request(x.graph, x.target, PlanOptions())) for x in passes]
    chosen = [made.get(x.backend or "", UNPRICED) for made, x in zip(prices, passes, strict=True)]
    if not all(price.is_known for price in chosen):
        return None
    known = [price.seconds for price in chosen]
    return predict_ranks(outlook, known) if outlook else sum(known)


def divide_weights(model: PreTrainedModel, gpus: int) -> None:
    """Leave one GPU's part of the weights, by transformers' plan for tensor parallelism.

    Raises GraphError for a model whose plan does not divide the heads, and for sizes that the
    number of GPUs does not divide.
    """
    plan = getattr(model, "tp_plan", None) or {}
    if not any(name.endswith("q_proj") for name in plan):
        raise GraphError(
            f"explain_model: {type(model).__name__} has no plan of transformers' that divides its "
            "heads over GPUs; write divide='context', or gpus=1"
        )
    text = model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % gpus:
        raise GraphError(
            f"explain_model: gpus {gpus} does not divide the {heads} key/value heads of "
            f"{type(model).__name__}; write divide='context', or another number"
        )
    for name, style in plan.items():
        axis = AXES.get(style)
        if axis is None or (style == "embedding_rowwise" and text.tie_word_embeddings):
            continue  # the logits read the whole embedding
        number = re.escape(name).replace(r"\*", r"\d+")
        pattern = rf"{number}(\.weight|\.bias)?"  # of a parameter, or of a module's
        for path, weight in [*model.named_parameters()]:
            if re.fullmatch(pattern, path) and weight.ndim >= -axis:
                divide_weight(model, path, weight, axis if weight.ndim > 1 else -1, gpus)


def divide_weight(model: torch.nn.Module, path: str, weight: Tensor, axis: int, gpus: int) -> None:
    """Replace a parameter by one GPU's part along an axis."""
    size = weight.shape[axis]
    if size % gpus:
        raise GraphError(
            f"explain_model: gpus {gpus} does not divide {path} {[*weight.shape]} along axis {axis}"
        )
    part = torch.empty_like(weight.narrow(axis, 0, size // gpus))
    home, _, name = path.rpartition(".")
    setattr(model.get_submodule(home), name, torch.nn.Parameter(part))


def explain_model(
    config: PreTrainedConfig | Mapping[str, Any] | str | Path,  # Any: JSON
    *,
    target: Target | str | None = None,
    phase: Phase = "prefill",
    batch: int = 1,
    context: int | None = None,
    dtype: torch.dtype | None = None,
    gpus: int = 1,
    divide: Division = "heads",
    link: str | float | None = None,
    reserve: int | str = RESERVE,
    search: bool = True,
) -> ModelExplanation:
    """The attention and the memory of a model of transformers, from its config alone.

    config: transformers' own, a dict of its JSON, or the path of the file. target: as in
    `attn_graph.explain`. phase: "prefill" reads a prompt of `context` tokens; "decode" is the step
    of the last one, with the others in the model's own cache; "train" is forward, backward and a
    step of AdamW. context: also the tokens of a decoder beside an encoder; by default the config's
    most. dtype: of the weights, by default the config's. reserve: bytes of the target's memory that
    are not the model's. search: also look for the largest batch and context that fit.

    gpus: how many share the model. divide: "heads" divides weights and heads by transformers' plan
    for tensor parallelism; "context" divides each sequence, with all weights on every GPU, as
    `attn_graph.shard` does, and link is their connection, as in `attn_graph.explain`. Messages of
    divided heads are not priced.

    The model is made on the meta device and run there, so that every byte is one that its own code
    asks for; nothing is allocated. Raises GraphError for models that do not read tokens or have no
    attention interface, for code that reads numbers off tensors, and for wrong options.
    """
    check_option("phase", phase, get_args(Phase))
    check_option("divide", divide, get_args(Division))
    read, room = read_config(config), parse_bytes(reserve)
    limit = getattr(read.get_text_config(decoder=True), "max_position_embeddings", None)
    context = check_size("context", (limit or 1) if context is None else context)
    model = make_model(read, dtype)
    check_size("batch", batch)
    if check_size("gpus", gpus) > 1 and divide == "heads":
        divide_weights(model, gpus)
    if gpus > 1 and divide == "context" and phase == "decode":
        raise GraphError(
            "explain_model: a step of decode has one query, so divide 'context' does not divide "
            "it; write divide='heads'"
        )
    place = (
        target if isinstance(target, Target) else Target.of(target) if target else default_target()
    )
    check_reserve(reserve, room, place)
    link_speed(link, place)  # raises for an unknown one, used or not
    paper = Paper(model, place, phase, room, gpus, divide, link)
    try:
        answer = paper.explain(batch, context)
    except RuntimeError as error:
        if limit is None or context <= limit:
            raise
        raise GraphError(
            f"explain_model: {type(model).__name__} can't run with context {context}; its config's "
            f"max_position_embeddings is {limit}"
        ) from error
    notes = (*notes_of(read, answer, limit, link), *answer.notes)
    answer = evolve(answer, limit=limit, notes=notes)
    return search_sizes(paper, answer) if search and answer.room is not None else answer


def search_sizes(paper: Paper, answer: ModelExplanation) -> ModelExplanation:
    """The answer with the largest batch and context that fit."""
    assert answer.room is not None
    batch, context, room = answer.batch, answer.context, answer.room
    if answer.weights + answer.optimizer > room:
        return evolve(answer, most_batch=0, most_context=0)
    longest, least = max(answer.limit or MOST_SIZE, context), 1 + (answer.phase == "decode")
    batches = largest_fit(lambda x: paper.explain(x, context).peak, room, batch, MOST_SIZE)
    contexts = largest_fit(lambda x: paper.explain(batch, x).peak, room, context, longest, least)
    return evolve(answer, most_batch=batches, most_context=contexts)


def read_config(config: Any) -> PreTrainedConfig:  # Any: checked here
    """A config of transformers. Raises GraphError for what is none, and for unknown types."""
    if isinstance(config, PreTrainedConfig):
        return config
    fields = load_fields(Path(config)) if isinstance(config, str | Path) else config
    try:
        made: PreTrainedConfig = transformers.AutoConfig.for_model(**fields)
    except (OSError, TypeError, ValueError) as error:
        what = config if isinstance(config, str | Path) else show(config)
        raise GraphError(f"explain_model: config {what} can't be read: {error}") from error
    return made


def load_fields(path: Path) -> Any:  # Any: JSON
    """The JSON of a file. Raises GraphError, with the way out, for an unreadable one."""
    try:
        return loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        files = [x.name for x in path.parent.iterdir()] if path.parent.is_dir() else []
        way_out = ""
        if near := nearest(path.name, files, {}):
            way_out = f"; did you mean {path.parent / near}?"
        elif path.suffix != ".json":  # the name of a model
            way_out = "; nothing is downloaded: save the model's config.json, and pass its path"
        raise GraphError(f"explain_model: config {path} does not exist{way_out}") from error
    except OSError as error:
        raise GraphError(
            f"explain_model: config {path} can't be read: {error.strerror}; pass the path of a "
            "model's config.json"
        ) from error
    except ValueError as error:
        raise GraphError(
            f"explain_model: config {path} is not JSON ({error}); pass the path of a model's "
            "config.json"
        ) from error


def make_model(config: PreTrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model of a config on the meta device. Raises GraphError for one that reads no tokens."""
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    make = transformers.AutoModelForCausalLM.from_config if kind is None else kind._from_config
    with torch.device("meta"):
        model: PreTrainedModel = make(
            config, attn_implementation=NAME, dtype=dtype or config.dtype or torch.float32
        )
    if model.main_input_name != "input_ids":
        raise GraphError(
            f"explain_model: {type(model).__name__} reads {model.main_input_name}, and only models "
            "that read input_ids are explained from a config; load it and call explain_layers"
        )
    return model


def check_option(name: str, value: object, known: Sequence[str]) -> None:
    """Raise GraphError for an unknown value."""
    if value not in known:
        raise GraphError(f"explain_model: {name} {show(value)} is none of {', '.join(known)}")


def check_size(name: str, size: object) -> int:
    """A number from 1 on. Raises GraphError otherwise."""
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_SIZE:
        raise GraphError(
            f"explain_model: {name} {show(size)} is not an integer from 1 to {MOST_SIZE}"
        )
    return size


def check_reserve(given: int | str, reserve: int, target: Target) -> None:
    """Raise GraphError for a reserve as large as the memory, or larger."""
    if target.memory is not None and reserve >= target.memory:
        raise GraphError(
            f"explain_model: reserve {show(given)} leaves no memory: {target.name} has "
            f"{format_bytes(target.memory)}; say less"
        )


def notes_of(
    config: PreTrainedConfig,
    answer: ModelExplanation,
    limit: int | None,
    link: str | float | None,
) -> Iterator[str]:
    """What to know of the figures."""
    if limit is not None and answer.context > limit:
        yield f"context {answer.context} is above the config's max_position_embeddings, {limit}"
    if getattr(config, "quantization_config", None) is not None:
        yield (
            "quantization_config is not read: weights count in the config's dtype, without "
            "quantisation"
        )
    if any(map(is_untold, answer.kinds)):
        yield "some workspace of cuDNN is known only once its plan is built, and counts 0 here"
    if link is not None and answer.gpus == 1:
        yield f"link {show(link)} has no effect: one GPU sends no messages"
    elif link is not None and answer.divide == "heads":
        yield (
            f"link {show(link)} has no effect: the messages of divide 'heads', sums over the GPUs "
            "after attention and after the MLP of each layer, have no price here"
        )
    if any(kind.leaves_out_messages for kind in answer.kinds):
        yield "times are without messages between the GPUs; link names their connection"


def largest_fit(
    count: Callable[[int], int], room: int, start: int, most: int, least: int = 1
) -> int:
    """The largest number up to `most` whose bytes are in the room; 0 if `least` needs more.

    The next one to try lies on the line through the last two, every fourth in the middle.
    """
    low, high, x = least - 1, most + 1, start
    tried: list[tuple[int, int]] = []
    for turn in range(MOST_ANSWERS):
        tried.append((x, count(x)))
        low, high = (x, high) if tried[-1][1] <= room else (low, x)
        if high - low <= 1:
            break
        guess = (low + high) // 2 if turn % 4 == 3 else cross(tried, room, most)
        x = min(max(guess, low + 1), high - 1)
    return low if low >= least else 0


def cross(tried: Sequence[tuple[int, int]], room: int, most: int) -> int:
    """Where the line through the last two of (number, bytes) reaches the room."""
    (x, size), (y, other) = tried[-1], tried[-2] if len(tried) > 1 else (0, 0)
    return most if size == other else int(x + (room - size) * (x - y) / (size - other))
