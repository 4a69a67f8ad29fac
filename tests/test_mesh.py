"""Real processes over gloo: whatever the mesh, an island computes the same thing."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from forked import run_ranks

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "mesh_worker.py"
MESHES = {"1x1": (1, 1), "fsdp 2": (2, 1), "tp 2": (1, 2), "fsdp 2 x tp 2": (2, 2)}
BRIEF, REST = ("built-in tied",), ("built-in untied", "llama tied", "llama untied")
# on the largest mesh only: it holds what the others could break
ON_BOTH, LATER = ("built-in frozen",), ("built-in muon", "built-in overlapped", "qwen3 with QK-norm")
STEPS, EVERY = 6, 3  # two rounds
RUN = {
    "data": {"sequence": 32},
    "inner": {"lr": 1e-3, "warmup": 2, "steps": STEPS, "clip": 0.5},  # every gradient of these models is above 0.5
    "sync": {"every": EVERY, "codec": "fp32"},
    "evaluate": {"samples": 16},
    "log": {"every": 1},
}


@pytest.fixture(scope="module")
def hf_folders(tmp_path_factory) -> dict[str, str]:
    transformers = pytest.importorskip("transformers")
    size = {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    configs = {
        "llama tied": transformers.LlamaConfig(**size, tie_word_embeddings=True),
        "llama untied": transformers.LlamaConfig(**size, tie_word_embeddings=False),
        "qwen3 with QK-norm": transformers.Qwen3Config(**size, tie_word_embeddings=True),
    }
    folders = {}
    for name, config in configs.items():
        folders[name] = str(tmp_path_factory.mktemp("hf"))
        config.save_pretrained(folders[name])
    return folders


def model_of(name: str, hf_folders: dict[str, str]) -> dict[str, object]:
    if name in hf_folders:
        return {"hf": hf_folders[name]}
    shape = {"blocks": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 64}
    freeze = ["blocks.0.*"] if name == "built-in frozen" else []
    return {"preset": "tiny", **shape, "tied": name != "built-in untied", "freeze": freeze}


@pytest.fixture(scope="module")
def results(tmp_path_factory, hf_folders) -> Callable[[str, str], dict]:
    """What a mesh makes of a model: the brief ones in one launch, the rest in another, when they are asked for."""

    @cache
    def launched(mesh: str, rest: bool) -> dict:
        fsdp, tp = MESHES[mesh]
        folder = tmp_path_factory.mktemp("mesh")
        cases = {}
        both = (fsdp, tp) in ((1, 1), (2, 2))
        for name in REST + LATER * both if rest else BRIEF + ON_BOTH * both:
            island = {"batch": 8, "accumulate": 2, "fsdp": fsdp, "tp": tp, "device": "cpu"}
            inner = {**RUN["inner"], "optimizer": "muon" if name == "built-in muon" else "adamw"}
            config = {**RUN, "model": model_of(name, hf_folders), "island": island, "inner": inner}
            if name == "built-in overlapped":  # it validates other parameters than it trains
                config["sync"] = {"every": EVERY, "delay": 2, "codec": "fp32"}
            cases[name] = {"config": {**config, "checkpoint": {"dir": str(folder / name)}}}
        if both and not rest:
            resumed = json.loads(json.dumps(cases["built-in tied"]))
            resumed["config"]["checkpoint"]["dir"] = str(folder / "resumed")
            cases["stopped and resumed"] = {**resumed, "stop_at": 4}
        return launch(folder, cases, processes=fsdp * tp)

    return lambda mesh, model: launched(mesh, model in REST + LATER)[model]


def launch(folder: Path, cases: dict, processes: int) -> dict:
    (folder / "cases.json").write_text(json.dumps(cases))
    words = str(folder / "cases.json"), str(folder / "out.json")
    run_ranks(WORKER, *words, count=processes, log=folder / "output.log")
    return json.loads((folder / "out.json").read_text())


CUT = [("fsdp 2 x tp 2", model) for model in (*BRIEF, *ON_BOTH)]
LONG = [("fsdp 2 x tp 2", model) for model in (*REST, *LATER)] + [
    (mesh, model) for mesh in ("fsdp 2", "tp 2") for model in (*BRIEF, *REST)
]
CUT += [pytest.param(*case, marks=pytest.mark.soak) for case in LONG]


@pytest.mark.parametrize(("mesh", "model"), CUT)
def test_losses_do_not_depend_on_the_mesh(results, mesh, model):
    alone, cut = results("1x1", model), results(mesh, model)
    assert len(cut["losses"]) == STEPS
    assert cut["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert cut["validation"] == pytest.approx(alone["validation"], rel=1e-4)
    assert (cut["parameters"], cut["trained"]) == (alone["parameters"], alone["trained"])


@pytest.mark.parametrize(("mesh", "model"), CUT)
def test_every_gradient_is_whole(results, mesh, model):
    alone, cut = results("1x1", model)["gradients"], results(mesh, model)["gradients"]
    assert cut == pytest.approx(alone, rel=1e-2, abs=1e-5)


@pytest.mark.parametrize(("mesh", "model"), CUT)
def test_ties_hold_and_island_and_outer_state_agree(results, mesh, model):
    result = results(mesh, model)
    assert len(result["ties"]) == (0 if "untied" in model else 1)
    assert result["agrees"]
    assert result["skipped"] == 0


@pytest.mark.parametrize(("mesh", "model"), CUT)
def test_values_travel_unchanged_in_buckets_that_are_never_larger_than_allowed(results, mesh, model):
    found = results(mesh, model)["buckets"]
    assert found["read"] and found["updated"] and found["written"]
    assert 0 < found["largest"] <= found["limit"]


@pytest.mark.parametrize(("mesh", "model"), CUT)
def test_a_step_reads_nothing_from_the_device(results, mesh, model):
    assert results(mesh, model)["reads"] == 0


def test_all_processes_find_the_same_number_of_micro_batches_though_one_alone_lacks_memory(tmp_path):
    def case(name: str, accumulate: object, **more: object) -> dict[str, object]:
        island = {"batch": 8, "accumulate": accumulate, "fsdp": 2, "device": "cpu"}
        tree = {**RUN, "model": model_of("built-in tied", {}), "island": island, "run": name}
        return {"config": {**tree, "checkpoint": {"dir": str(tmp_path / name)}}, **more}

    found = launch(tmp_path, {"found": case("found", "auto", rows=2), "written": case("written", 2)}, 2)
    assert found["found"]["accumulate"] == 2
    assert found["found"]["losses"] == found["written"]["losses"]


@pytest.mark.parametrize("mesh", ["1x1", "fsdp 2 x tp 2"])
def test_resuming_changes_nothing(results, mesh):
    assert results(mesh, "stopped and resumed")["losses"] == results(mesh, "built-in tied")["losses"]


@pytest.mark.parametrize(
    ("shape", "tp", "complaint"),
    [
        ({"heads": 4, "kv_heads": 1}, 2, "island.tp=2 does not divide the 1 heads"),
        ({"hf": "gpt2"}, 2, "needs a Llama-type model"),
    ],
)
def test_what_tensor_parallelism_cannot_cut_is_refused(shape, tp, complaint, tmp_path):
    from diloco.config.schema import ModelConfig
    from diloco.errors import ModelError
    from diloco.island.parallel import check_tensor_parallel
    from diloco.model.build import build_network

    if "hf" in shape:
        transformers = pytest.importorskip("transformers")
        transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
        shape = {"hf": str(tmp_path)}
    network = build_network(ModelConfig(**shape), data_vocab=256, sequence=32, seed=0)
    with pytest.raises(ModelError, match=complaint):
        check_tensor_parallel(network.module, network.anatomy, tp)
