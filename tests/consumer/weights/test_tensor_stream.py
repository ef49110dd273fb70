"""Weights are written tensor by tensor, into one file or into shards that Hugging Face's loaders read."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file, save
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.chain import is_chain
from rollq.buffer.weights.loading import load_weights
from rollq.buffer.weights.manifest import INDEX_FILE, weight_files
from rollq.buffer.weights.store import StoredWeights
from rollq.consumer.settings import Transport
from rollq.consumer.weights.checkpoint_format import (
    divide_model,
    gather,
    model_stream,
    shapes_of,
    state_dict_stream,
    to_checkpoint_format,
    untied,
)
from rollq.consumer.weights.model_folders import UnfinishedModels, write_model
from rollq.consumer.weights.places import make_place
from rollq.consumer.weights.publisher import WeightPublisher
from rollq.consumer.weights.safetensors import write_tensors
from rollq.consumer.weights.sources import weights_source
from rollq.consumer.weights.tensor_stream import TensorStream
from rollq.workers.engines.transformers.weights import copy_weights, read_weights
from support.tiny_qwen3 import tiny_qwen3
from support.untrained_models import FAMILIES, make_model

FILE_BYTES = 20_000
every_family = pytest.mark.parametrize("family", FAMILIES)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in weight_files(folder) for name, tensor in load_file(path).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].equal(tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_file_has_the_bytes_that_the_library_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    state = make_model("llama", dtype).state_dict()
    write_model(tmp_path, state_dict_stream(state), max_file_bytes=1 << 30)
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == save(state, {"format": "pt"})


@every_family
def test_shards_load_as_the_model_of_any_family(family: str, tmp_path: Path) -> None:
    """In transformers, and in a worker's engine."""
    model = make_model(family)
    model.config.save_pretrained(tmp_path)
    write_model(tmp_path, model_stream(model), max_file_bytes=FILE_BYTES)
    index = orjson.loads((tmp_path / INDEX_FILE).read_bytes())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 3
    assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert not (tmp_path / "model.safetensors").exists()
    for file in files:
        tensors = load_file(tmp_path / file)
        assert {name for name, at in index["weight_map"].items() if at == file} == tensors.keys()
        assert sum(tensor.nbytes for tensor in tensors.values()) <= FILE_BYTES or len(tensors) == 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read_all(tmp_path).values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(loaded.state_dict(), model.state_dict())
    served = make_model(family)
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.zero_()
    copy_weights(read_weights(tmp_path, served), served)
    assert_same(served.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@every_family
def test_rounded_weights_are_those_of_torch_except_where_transformers_keeps_float32(
    family: str, name: str, tmp_path: Path
) -> None:
    model, dtype = make_model(family), getattr(torch, name)
    model.save_pretrained(tmp_path / "whole")
    write_model(tmp_path, model_stream(model, dtype=name), max_file_bytes=1 << 30)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=dtype).state_dict()
    precise = {name for name, tensor in loaded.items() if tensor.dtype == torch.float32}
    assert bool(precise) == (family == "deepseek_v3" or (family, name) == ("gpt_oss", "float16"))
    expected = {
        name: tensor if name in precise else tensor.to(dtype) for name, tensor in read_all(tmp_path / "whole").items()
    }
    assert_same(read_all(tmp_path), expected)


def test_only_floats_of_16_bits_and_more_are_rounded(tmp_path: Path) -> None:
    state = {
        "double": torch.randn(3, dtype=torch.float64),
        "half": torch.randn(3).to(torch.float16),
        "fp8": torch.randn(3).to(torch.float8_e4m3fn),
        "count": torch.arange(3),
    }
    write_model(tmp_path, state_dict_stream(state, dtype="bfloat16"), max_file_bytes=1 << 30)
    found = read_all(tmp_path)
    assert found["double"].equal(state["double"].to(torch.bfloat16))
    assert found["half"].equal(state["half"].to(torch.bfloat16))
    assert found["fp8"].view(torch.uint8).equal(state["fp8"].view(torch.uint8))
    assert found["count"].equal(state["count"])


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = tiny_qwen3()
    with torch.no_grad():
        model.model.norm.weight[3] = -70_000
    with pytest.raises(WeightsError, match=r"^tensor 'model.norm.weight' has values beyond 65504, .* \"bfloat16\"$"):
        write_model(tmp_path, model_stream(model, dtype="float16"), max_file_bytes=1 << 30)
    write_model(tmp_path, model_stream(model, dtype="bfloat16"), max_file_bytes=1 << 30)
    half = {"w": torch.tensor([torch.inf], dtype=torch.float16)}
    assert dict(state_dict_stream(half, dtype="float16"))["w"].equal(half["w"]), "it is not rounded"


@every_family
def test_each_tensor_in_memory_is_converted_by_itself(family: str) -> None:
    model = make_model(family)
    described = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    assert all(len(part.sources) == 1 for part in divide_model(model, described))


def test_a_conversion_that_fails_on_one_tensor_alone_is_given_those_of_a_layer() -> None:
    """Ernie 4.5 VL has experts for text and for images, which its files count through together."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("ernie4_5_vl_moe"))
    state = untied(model, model.state_dict(), lambda *_: True)
    parts = divide_model(model, state)
    described = {name: tensor for part in parts for name, tensor in part.described.items()}
    assert shapes_of(described) == shapes_of(to_checkpoint_format(model, state))
    joined = [part.sources for part in parts if len(part.sources) > 1]
    assert joined
    for sources in joined:
        assert len({name.partition(".mlp.")[0] for name in sources}) == 1, "of one layer"


def test_tensors_that_a_conversion_joins_are_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where files have one tensor for query, key and value."""

    def joined(_: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rest = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
        for layer in (0, 1):
            halves = [tensors.get(f"model.layers.{layer}.mlp.{half}_proj.weight") for half in ("gate", "up")]
            if present := [half for half in halves if half is not None]:
                rest[f"model.layers.{layer}.mlp.gate_up.weight"] = torch.cat(present)
        return rest

    model = tiny_qwen3()
    state = {name: tensor for name, tensor in model.state_dict().items() if "down_proj" not in name}
    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", joined)
    described = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    parts = divide_model(model, described)
    assert [part.sources for part in parts if len(part.sources) > 1] == [
        tuple(f"model.layers.{layer}.mlp.{half}_proj.weight" for half in ("gate", "up")) for layer in (0, 1)
    ]
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        found |= part.convert({name: state[name] for name in part.sources})
    assert_same(found, joined(model, state))


def test_one_tensor_is_alive_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    state = {f"t{number}": torch.ones(1000) for number in range(5)}
    described = {name: torch.empty(1000, dtype=torch.bfloat16, device="meta") for name in state}
    gathered = gather(state, described, state)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            gc.collect()
            assert not [one for one in alive if one() is not None]
            try:
                name, tensor = next(gathered)
            except StopIteration:
                return
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    write_model(tmp_path, TensorStream(described, tensors()), max_file_bytes=FILE_BYTES)
    assert len(alive) == len(described)


def test_a_tensor_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    described = {name: torch.empty(4, device="meta") for name in ("a", "b")}
    with pytest.raises(WeightsError, match="tensor 'b' was announced by transformers, but is missing"):
        write_tensors(tmp_path / "file", TensorStream(described, iter([("a", torch.ones(4))])))


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("a", torch.ones(5), r"tensor 'a' has dtype torch.float32 and shape \(5,\): torch.float32 and \(4,\) were"),
        ("a", torch.ones(4).int(), r"tensor 'a' has dtype torch.int32 and shape"),
        ("c", torch.ones(4), "tensor 'c' was not announced"),
        ("b", torch.ones(4), "tensor 'b' came twice"),
    ],
)
def test_a_tensor_that_is_not_as_announced_is_not_written(
    name: str, tensor: torch.Tensor, expected: str, tmp_path: Path
) -> None:
    described = {name: torch.empty(4, device="meta") for name in ("a", "b")}
    stream = TensorStream(described, iter([("b", torch.zeros(4)), (name, tensor)]))
    with pytest.raises(WeightsError, match=expected):
        write_tensors(tmp_path / "file", stream)
    assert load_file(tmp_path / "file")["b"].equal(torch.zeros(4))


@pytest.mark.parametrize("transport", ["redis", "path"])
def test_deltas_of_shards_give_every_bit(transport: Transport, buffer: Buffer, tmp_path: Path) -> None:
    buffer.create_run()
    model, worker = tiny_qwen3(), tmp_path / "worker"
    publisher = WeightPublisher(buffer, transport, tmp_path / "shared", 3, full_every=4, max_file_bytes=FILE_BYTES)
    epoch = None
    for version in range(6):
        change(model, version)
        stored = publisher.put(weights_source(model))
        assert is_chain(stored.uri) == (version % 4 != 0)
        if epoch is None:
            epoch = buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri=stored.uri, digest=stored.digest)
        else:
            buffer.publish(epoch, version, uri=stored.uri, digest=stored.digest)
        for into in (worker, tmp_path / f"late-{version}"):
            folder = load_weights(buffer, *stored, into=into)
            assert (folder / INDEX_FILE).exists()
            assert_same(read_all(folder), model.state_dict())


def change(model: PreTrainedModel, version: int) -> None:
    """A few values; the norms stay as they are."""
    torch.manual_seed(version)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter[torch.rand(parameter.shape) < 0.02] *= 1.01


def test_what_a_killed_trainer_left_unfinished_is_removed_at_the_next_start(buffer: Buffer, tmp_path: Path) -> None:
    buffer.create_run()
    model, shared = tiny_qwen3(), tmp_path / "shared"
    others = [shared / f".weights-{run}.unfinished-{'a' * 8}" for run in ("other", f"{buffer.run}-2")]
    left = shared / f".weights-{buffer.run}.unfinished-{'a' * 8}"
    for folder in (*others, left):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
    stored = WeightPublisher(buffer, "path", shared, 3).start(weights_source(model))
    assert not left.exists()
    assert {path.as_uri() for path in shared.iterdir()} == {stored.uri, *(other.as_uri() for other in others)}


@pytest.mark.parametrize("transport", ["redis", "s3"])
def test_what_a_killed_trainer_left_in_tmpdir_is_removed_at_the_next_start(
    transport: Transport, buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.create_run()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def unfinished() -> UnfinishedModels:
        return UnfinishedModels(buffer, make_place(buffer, transport, "s3://bucket/prefix", 3, None).scratch, 4)

    killed = unfinished().written(state_dict_stream({"w": torch.zeros(1)}))
    left = killed.__enter__()
    assert left.parent == tmp_path
    other = left.with_name(left.name.replace(buffer.incarnation, "0" * 32))
    other.mkdir()
    unfinished().clear()
    assert list(tmp_path.iterdir()) == [other], "of a run of that name in another store"


def test_a_trainer_killed_as_it_removes_old_weights_leaves_no_part_of_them_under_their_name(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.create_run()
    publisher = WeightPublisher(buffer, "path", tmp_path, 1)
    first = publisher.put(weights_source({"w": torch.zeros(4)}))

    class Killed(BaseException):
        pass

    def half(folder: Path, **_: bool) -> None:
        if Path(folder).exists():
            (folder / "model.safetensors").unlink()
            raise Killed

    publisher.put(weights_source({"w": torch.ones(4)}))
    with monkeypatch.context() as changed:
        changed.setattr("shutil.rmtree", half)
        with pytest.raises(Killed):
            publisher.put(weights_source({"w": torch.full((4,), 2)}))
    again = WeightPublisher(buffer, "path", tmp_path, 3).start(weights_source({"w": torch.zeros(4)}))
    assert again == first
    assert read_all(load_weights(buffer, *again, into=tmp_path / "worker"))["w"].equal(torch.zeros(4))
    assert not list(tmp_path.glob(".weights-*"))


def test_a_failure_leaves_nothing_behind(buffer: Buffer, tmp_path: Path) -> None:
    buffer.create_run()
    described = {name: torch.empty(4, device="meta") for name in ("a", "b")}
    for transport in ("path", "redis"):
        publisher = WeightPublisher(buffer, transport, tmp_path / "shared", 3)
        with pytest.raises(WeightsError, match="but is missing"):
            publisher.put(TensorStream(described, iter([("a", torch.ones(4))])))
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_model_that_is_too_large_for_redis_is_refused_before_it_is_gathered(buffer: Buffer) -> None:
    buffer.create_run()

    stream = TensorStream({"large": torch.empty(1 << 28, device="meta")}, iter(()))
    with pytest.raises(WeightsError, match="weights of 1024 MiB are too large for Redis"):
        WeightPublisher(buffer, "redis", None, 3).put(stream)


def test_the_bytes_of_a_stored_model_do_not_depend_on_how_it_is_stored(buffer: Buffer, tmp_path: Path) -> None:
    buffer.create_run()
    model = tiny_qwen3()
    found: list[StoredWeights] = [
        WeightPublisher(buffer, transport, tmp_path / "shared", 3, max_file_bytes=FILE_BYTES).put(weights_source(model))
        for transport in ("path", "redis")
    ]
    assert found[0].digest == found[1].digest
