# SPDX-License-Identifier: Apache-2.0
"""examples/pretrain.py at its tiny size: the same training whatever runs the experts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import pretrain.models as models  # noqa: E402
import pretrain.plot as plot  # noqa: E402
from pretrain.attribution import ranges_of  # noqa: E402
from pretrain.data import Batches, load_tokens  # noqa: E402
from pretrain.loop import WARMUP, Record, Trainer, median_step_ms, train  # noqa: E402
from pretrain.profile import KINDS, RANGES, add_ranges, profile, table, trace_of  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TEXT = ROOT / "docs" / "design.md"


def load_main():
    """The script itself; its name is also that of the folder beside it."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("pretrain_script", ROOT / "examples" / "pretrain.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_main()


def run(capsys, tmp_path, device: str, *options: str) -> tuple[dict[str, str], list[float]]:
    """The fields of the result line and the losses of one run."""
    csv = tmp_path / "run.csv"
    csv.unlink(missing_ok=True)
    argv = ["train", "--size", "tiny", "--data", str(TEXT), "--device", device, "--csv", str(csv)]
    assert SCRIPT.main([*argv, *options]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("result: ")
    (curves,) = plot.read_runs([csv]).values()
    (record,) = curves.values()
    return dict(field.split("=") for field in line.split()[1:]), record.losses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", models.MODELS)
def test_same_losses(capsys, tmp_path, model: str, device: str) -> None:
    options = ("--model", model, "--steps", "12", "--dtype", "float32", "--lr", "3e-3")
    result, losses = run(capsys, tmp_path, device, *options, "--moe", "moeblas")
    assert (result["model"], result["run"]) == (model, "moeblas")
    assert losses[-1] < losses[0] - 0.2, "wanted a model that learns"
    _, eager = run(capsys, tmp_path, device, *options, "--moe", "eager")
    # On a GPU the eager experts add in any order, which may move a token near a tie.
    assert losses == pytest.approx(eager, rel=1e-4 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16(capsys, tmp_path, device: str) -> None:
    options = ("--model", "gpt-oss", "--steps", "12", "--lr", "3e-3")
    _, losses = run(capsys, tmp_path, device, *options, "--moe", "moeblas")
    _, eager = run(capsys, tmp_path, device, *options, "--moe", "eager")
    assert losses == pytest.approx(eager, rel=1e-2)


def test_seed_decides(capsys, tmp_path) -> None:
    options = ("--steps", "3", "--dtype", "float32", "--moe", "moeblas")
    _, first = run(capsys, tmp_path, "cpu", *options)
    _, again = run(capsys, tmp_path, "cpu", *options)
    _, other = run(capsys, tmp_path, "cpu", *options, "--seed", "2")
    assert first == again and first != other


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("model", models.MODELS)
def test_graph_is_the_eager_run(capsys, tmp_path, model: str) -> None:
    options = ("--model", model, "--steps", str(WARMUP + 10), "--lr", "3e-3")
    _, eager = run(capsys, tmp_path, "cuda", *options)
    result, losses = run(capsys, tmp_path, "cuda", *options, "--graph")
    assert result["run"] == "moeblas+graph"
    assert losses == pytest.approx(eager, rel=1e-2)


def fake_step(model: str, implementation: str) -> None:
    """A whole step on tensors without values: raises where the host would read one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = models.make_config(model, "tiny", 256, 64)
    with FakeTensorMode():
        built = models.build(config, implementation, torch.device("cpu"), torch.bfloat16, 1)
        loss = Trainer(built, 1e-3, 20, capturable=False)(torch.zeros(2, 64, dtype=torch.long))
        assert loss.shape == ()


@pytest.mark.parametrize("model", models.MODELS)
def test_no_step_waits_for_the_device(model: str) -> None:
    """What a CUDA graph needs, shown without a GPU; the loop over experts does wait."""
    import moeblas.hf

    moeblas.hf.register()
    fake_step(model, "moeblas")
    with pytest.raises(Exception, match="nonzero"):
        fake_step(model, "eager")


@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_sink_attention(tokens: int) -> None:
    """The prepended position is GPT-OSS's own attention with sinks, forward and backward."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    torch.manual_seed(0)
    shapes = ((2, 4, tokens, 16), (2, 2, tokens, 16), (2, 2, tokens, 16), (4,))
    inputs = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes]
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks, module.sliding_window = 2, inputs[3], None
    mask = torch.full((tokens, tokens), float("-inf"), dtype=torch.double).triu(1)
    wanted, _ = eager_attention_forward(module, *inputs[:3], mask, 0.25)
    found, _ = models.causal_attention(module, *inputs[:3], None, 0.25, s_aux=inputs[3])
    torch.testing.assert_close(found, wanted)
    dout = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(out, inputs, dout) for out in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_attention_refuses_a_window() -> None:
    module = torch.nn.Module()
    module.sliding_window = 8
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="wanted plain causal attention"):
        models.causal_attention(module, q, q, q, None, 1.0)


def test_flops() -> None:
    """qwen3 tiny by hand: 2 layers of attention, router and 2 of 8 experts, and the head."""
    model = models.build(
        models.make_config("qwen3", "tiny", 256, 64), "eager", torch.device("cpu"), torch.float32, 1
    )
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    layer = attention + 8 * 64 + 2 * 3 * 64 * 32
    wanted = 6 * (2 * layer + 256 * 64) + 2 * 3 * 2 * 16 * 4 * 64
    assert models.flops_per_token(model, 64) == wanted


@pytest.mark.parametrize("model", models.MODELS)
def test_full_sizes(model: str) -> None:
    with torch.device("meta"):
        config = models.make_config(model, "full", 256, 4096)
        built = models.AutoModelForCausalLM.from_config(config)
    assert 1e9 <= sum(p.numel() for p in built.parameters()) <= 3e9


@pytest.mark.parametrize("device", DEVICES)
def test_profile(device: str) -> None:
    import moeblas.hf

    moeblas.hf.register()
    device = torch.device(device)
    config = models.make_config("qwen3", "tiny", 256, 64)
    trainer = Trainer(
        models.build(config, "moeblas", device, torch.float32, 1), 1e-3, 20, capturable=False
    )
    tokens, _ = load_tokens(TEXT, None)
    batches = Batches(tokens.to(device), 6, 2, 64, 1)
    record = train(trainer, batches, 4, False, lambda *_: None)
    lines = profile(trainer, batches, 4, 2, median_step_ms(record.times_ms)).splitlines()
    share = {line.split()[0]: float(line.split()[-2]) for line in lines[1:]}
    assert tuple(share) == KINDS
    for kind in ("experts", "router", "attention", "optimizer", "rest"):
        assert share[kind] > (0.5 if device.type == "cpu" else 0), kind  # a tiny model: mostly gaps
    assert sum(share.values()) == pytest.approx(100, abs=0.4)


@pytest.mark.parametrize("moe, op", [("moeblas", "moeblas::"), ("grouped_mm", "_grouped_mm")])
def test_profile_follows_the_backward_pass(moe: str, op: str) -> None:
    """Ops are told apart by their names here, and by ranges in the profile."""
    import moeblas.hf

    moeblas.hf.register()
    config = models.make_config("deepseek-v3", "tiny", 256, 64)
    model = models.build(config, moe, torch.device("cpu"), torch.float32, 1)
    trainer = Trainer(model, 1e-3, 20, capturable=False)
    add_ranges(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer(torch.arange(128).view(2, 64))
    hosts, works = trace_of(profiler)
    kinds = [(host.name, kind) for host, kind in zip(hosts, ranges_of(hosts, RANGES), strict=True)]
    for name, kind in (("flash_attention", "attention"), (op, "experts"), ("_fused", "optimizer")):
        found = [found for event, found in kinds if name in event]
        assert len(found) >= 2 - (kind == "optimizer") and set(found) == {kind}, name
    heads = [kind for name, kind in kinds if name in ("aten::_log_softmax_backward_data",)]
    assert heads == [None] and works == []


def test_profile_adds_up() -> None:
    """Gaps are what is left; a step busy for longer than it took otherwise is as long."""
    kinds = {"experts": 30.0, "optimizer": 20.0}
    for step_ms, unknown, shares in (
        (100.0, 0.0, [30, 0, 0, 20, 0, 50]),
        (40.0, 0.0, [60, 0, 0, 40, 0, 0]),
        (100.0, 10.0, [30, 0, 0, 20, 0, 40, 10]),
    ):
        head, *rows = table(kinds, unknown, step_ms).splitlines()
        assert f"{max(step_ms, 50):.2f} ms" in head
        assert [float(row.split()[-2]) for row in rows] == shares
        assert [row.split()[0] for row in rows] == [*KINDS, "unknown"][: len(shares)]


def test_batches() -> None:
    tokens = torch.arange(100)
    batches = Batches(tokens, 3, 2, 10, 7)
    for step in range(3):
        batch = batches[step]
        assert batch.shape == (2, 10) and (batch.diff() == 1).all()
    assert not torch.equal(batches[0], batches[1])
    with pytest.raises(ValueError, match="--data has 10 tokens, wanted more than 10"):
        Batches(tokens[:10], 1, 1, 10, 7)


def test_tokenizer(tmp_path) -> None:
    """A tokenizer on disk: words of a text become its ids, and its size the vocabulary."""
    from tokenizers import Tokenizer, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    coder = Tokenizer(BPE(unk_token="?"))
    coder.pre_tokenizer = pre_tokenizers.Whitespace()
    coder.train([str(TEXT)], trainers.BpeTrainer(vocab_size=400, special_tokens=["?"]))
    PreTrainedTokenizerFast(tokenizer_object=coder).save_pretrained(tmp_path)
    tokens, vocab = load_tokens(TEXT, tmp_path)
    assert vocab == 400 and tokens.dtype == torch.int64 and tokens.max() < vocab
    assert tokens.tolist() == coder.encode(TEXT.read_text(encoding="utf-8")).ids


def test_plot(capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    plot.write_csv(files[0], "qwen3", "moeblas", Record([5.0, 4.0, 3.0], [9.0, 1.0, 2.0], 0))
    plot.write_csv(files[1], "qwen3", "eager", Record([5.0, 4.5], [1.0, 1.0], 0))
    plot.write_csv(files[1], "gpt-oss", "eager", Record([6.0], [7.0], 0))
    out = tmp_path / "loss.png"
    assert SCRIPT.main(["plot", *map(str, files), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [
        ["gpt-oss", "eager", "1", "7.00", "6.0000", "0.0000"],
        ["qwen3", "moeblas", "3", "2.00", "4.0000", "0.0000"],
        ["qwen3", "eager", "2", "1.00", "4.7500", "0.2500"],
    ]


def test_plot_refuses(capsys, tmp_path) -> None:
    file = tmp_path / "a.csv"
    plot.write_csv(file, "qwen3", "moeblas", Record([5.0, 4.0], [1.0, 1.0], 0))
    plot.write_csv(file, "qwen3", "moeblas", Record([5.0, 4.0], [1.0, 1.0], 0))
    for text, words in (
        (file.read_text(), "step 0 of qwen3 moeblas, wanted 2"),
        ("a,b\n1,2\n", "columns ['a', 'b'], wanted"),
        (",".join(plot.FIELDS) + "\n", "no rows, wanted at least one run"),
    ):
        file.write_text(text)
        assert SCRIPT.main(["plot", str(file), "--out", str(tmp_path / "x.png")]) == 1
        assert words in capsys.readouterr().err


def test_median_leaves_the_first_steps_out() -> None:
    assert median_step_ms([100.0] * (WARMUP + 1) + [3.0, 1.0, 2.0]) == 2.0


@pytest.mark.parametrize(
    "options, words",
    [
        (["--graph", "--device", "cpu"], "--graph with --device cpu, wanted cuda"),
        (["--graph", "--device", "cuda", "--moe", "eager"], "--graph with --moe eager"),
        (["--graph", "--device", "cuda", "--steps", "5"], "wanted more than 5"),
        (["--profile", "--compile"], "--profile with --graph or --compile"),
        (["--steps", "0"], "--steps is 0, wanted at least 1"),
    ],
)
def test_refuses_options(capsys, options: list[str], words: str) -> None:
    with pytest.raises(SystemExit):
        SCRIPT.main(["train", "--data", str(TEXT), *options])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    [
        (["--moe", "liger", "--model", "gpt-oss"], "pretrain: liger: GPT-OSS's experts have"),
        (["--moe", "sonicmoe", "--model", "gpt-oss"], "pretrain: sonicmoe: GPT-OSS's experts"),
        (["--data", str(ROOT / "absent")], "No such file or directory"),
    ],
)
def test_refuses_runs(capsys, options: list[str], words: str) -> None:
    assert SCRIPT.main(["train", "--size", "tiny", "--data", str(TEXT), *options]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_refuses_missing_peers(capsys) -> None:
    argv = ["train", "--size", "tiny", "--model", "qwen3", "--data", str(TEXT), "--moe"]
    for peer, words in (("liger", "its Triton kernels need a GPU"), ("sonicmoe", "sonicmoe: ")):
        assert SCRIPT.main([*argv, peer]) == 1
        assert words in capsys.readouterr().err
