"""Modes compared with `single` through the real command line: equal numbers, supported options, and
refusals.
"""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import pytest

from tests import warm
from tests.command_line import QUIET, environment, losses, ok, result, suggested, trainer
from tests.options import OPTIONS
from tests.pages import COLUMNS, GUIDE, PLAIN, options_table, turned_on
from tests.training.whole_runs import SAME
from trainer.data import DataShare
from trainer.recipe import TRAITS, load
from trainer.training.banner import warn_of_small_batch_norm

# -------------------------------------------------------------------------------------------- modes
# x models


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """mode=single's folder."""
    folder = tmp_path_factory.mktemp("single") / "run"
    ok(*SAME, "model.name=cnn_gn", "mode=single", f"output={folder}")
    return folder


@pytest.mark.slow
def test_a_pipeline_of_uneven_micro_batches_has_the_losses_of_single(single, tmp_path):
    words = ["mode=pipeline", "devices=[cpu,cpu]", "pipeline.split_size=24"]
    ok(*SAME, "model.name=cnn_gn", *words, f"output={tmp_path / 'run'}", timeout=300)
    ours = result(tmp_path / "run")
    reference = result(single)
    assert (ours["mode"], ours["world_size"], ours["devices"]) == (
        "pipeline",
        1,
        ["cpu:0", "cpu:1"],
    )
    assert (ours["pipeline"]["stages"], ours["pipeline"]["microbatches"]) == (2, 3)
    assert ours["data"]["val_samples"] == 360 and ours["steps"] == 20
    assert len(ours["pipeline"]["cuts"]) == ours["pipeline"]["stages"] - 1
    assert len(losses(single)) == 20
    assert losses(tmp_path / "run") == pytest.approx(losses(single), rel=1e-4)
    assert ours["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-4)
    assert ours["val_top1"] == reference["val_top1"]


@pytest.mark.slow
def test_micro_batches_are_chosen_by_measuring(single, tmp_path):
    words = ["mode=pipeline", "nproc=2"]  # microbatches=auto, schedule 1f1b
    completed = ok(*SAME, "model.name=cnn_gn", *words, f"output={tmp_path / 'run'}")
    ours = result(tmp_path / "run")
    assert "pipeline: measuring" in completed.stdout
    trials = ours["pipeline"]["trials"]
    best = min(trials, key=lambda trial: trial["seconds"])
    assert len(trials) >= 3 and best["microbatches"] == ours["pipeline"]["microbatches"]
    assert best["cuts"] == ours["pipeline"]["cuts"]
    assert 0 <= ours["pipeline"]["bubble_predicted"] < 1
    assert json.loads((tmp_path / "run" / "tuning.json").read_text())["trials"] == trials
    assert losses(tmp_path / "run") == pytest.approx(losses(single), rel=1e-4), (
        "measuring leaves no trace"
    )


# -------------------------------------------------------------------------------------------
# options x modes

APART = [f"`{mode}`" for mode, traits in TRAITS.items() if not traits.same_maths]
# Options that change the numbers.
SHOWS = (
    "fp16",
    "bf16",
    "ema",
    "mixup",
    "clip_grad_norm",
    "label_smoothing",
)


@pytest.mark.slow
def test_the_guide_has_this_table():
    assert options_table() in (GUIDE / "modes.md").read_text()


# Recipes one after the other in the same ranks, which is quicker than a start for each. Each run is
# to the launcher's store what a restart would be: with keys of its own.
IN_TURN = """
import json, os, sys
from trainer import load_recipe, train
from trainer.errors import explain

for number, (name, words) in enumerate(json.load(open(sys.argv[1]))):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    line, code = "", 0
    try:
        train(load_recipe("digits", *words))
    except Exception as error:
        line, code = explain(error)
    if os.environ.get("RANK", "0") == "0":
        print("ended", json.dumps([name, code, line]), flush=True)
    if code not in (0, 2):
        break
sys.stdout.flush()
os._exit(0)
"""


def in_turn(jobs, count, folder, timeout, env=None):
    """Train several recipes in `count` ranks: (exit code, line) of each, by name. Stops at the
    first that breaks.
    """
    folder.mkdir()
    (folder / "script.py").write_text(IN_TURN)
    (folder / "jobs.json").write_text(json.dumps(list(jobs.items())))
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        if count > 1
        else []
    )
    command = [sys.executable, *launcher, str(folder / "script.py"), str(folder / "jobs.json")]
    completed = warm.run(
        command,
        env=environment(**(env or {})),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    ended = [
        json.loads(line.removeprefix("ended "))
        for line in completed.stdout.splitlines()
        if line.startswith("ended ")
    ]
    assert ended, completed.stderr
    return {name: (code, line) for name, code, line in ended}


TRAINED = [
    "batch_size=64",
    "optimizer.lr=0.01",
    "schedule.warmup_epochs=0",
    "augment.crop=none",
    "max_steps=3",
]
TRAINED += ["threads=1", "timeout=60", *QUIET]


def pairs_job(option, column, folder):
    """Return the arguments of a pair; BatchNorm is used only if it matters, because it changes the
    results of modes.
    """
    model = "cnn" if option == "sync_bn" else "cnn_gn"
    # The option is on by default.
    layout = [] if option == "channels_last" else ["channels_last=false"]
    return [
        *TRAINED,
        *layout,
        f"model.name={model}",
        *COLUMNS[column][1],
        *turned_on(option),
        f"output={folder}",
    ]


def refusals(column):
    """Return the options that a mode does not support, with the reasons."""
    _, (mode, *_) = COLUMNS[column]
    return TRAITS[mode.removeprefix("mode=")].refuses


def sampled(option, column):
    """Whether the fast tests try it: an option by itself and in ddp, what is refused, and an eighth
    of the others.
    """
    mode = COLUMNS[column][1][0].removeprefix("mode=")
    if option == PLAIN or mode in ("single", "ddp") or option in refusals(column):
        return True
    if option == "fp16":  # The option fp16 takes seconds on a CPU.
        return False
    return ([*OPTIONS].index(option) + [*COLUMNS].index(column)) % 8 == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_every_option_in_every_mode_works_or_is_refused(part, tmp_path, full):
    """A supported option gives the numbers that it gives in `single`.

    Others are refused with the reason in the mode's traits.
    """
    # Compiling takes a minute.
    own = [option for option in OPTIONS if option != "compile" or full][part::3]
    tried = [
        (option, column)
        for option in (PLAIN, *own)
        for column in COLUMNS
        if full or sampled(option, column)
    ]
    ended = {}
    for count in (1, 2):
        pairs = [(option, column) for option, column in tried if COLUMNS[column][0] == count]
        jobs = {f"{o} in {c}": pairs_job(o, c, tmp_path / f"{o} in {c}") for o, c in pairs}
        ended |= in_turn(jobs, count, tmp_path / str(count), timeout=1800 if full else 240)
    wrong = {}
    for option, column in tried:
        name = f"{option} in {column}"
        reason = refusals(column).get(option)
        code, line = ended.get(name, (None, "never came to it"))
        if (code != 2 or reason not in line) if reason else code != 0:
            wrong[name] = (code, line)
    assert not wrong

    def figures(option, column):
        folder = tmp_path / f"{option} in {column}"
        run_result = result(folder)
        assert run_result["steps"] == 3 and run_result["data"]["val_samples"] == 360
        return [*losses(folder), run_result["val_loss"]]

    for name, (code, _) in ended.items():
        option, _, column = name.partition(" in ")
        if code == 0:
            run_result = figures(option, column)
            assert all(map(math.isfinite, run_result)), name
            if column not in APART:
                # Muon orthogonalises in bf16.
                near = {"fp16": 2e-2, "bf16": 2e-2, "muon": 2e-3}.get(option, 1e-4)
                # shares, which change no number.
                same = PLAIN if option in refusals("`single`") else option
                assert run_result == pytest.approx(figures(same, "`single`"), rel=near), name
            if option in SHOWS and column != "`hogwild`":
                assert run_result != figures(PLAIN, column), f"{name} has no effect"


# --------------------------------------------------------------------------------------------------
# wrong use


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("mode=split nproc=2", "mode=split 2"),
        ("mode=split devices=[cpu,cpu] pipeline.stages=3", "3 devices="),
        ("mode=pipeline nproc=4 pipeline.stages=2 batch_size=63", "batch_size=63 batch_size=60 64"),
        # These cases need the model.
        (
            "mode=pipeline nproc=2 model.name=vit_tiny pipeline.cuts=[encoder.encoder_layer_1]",
            "encoder.encoder_layer_1 encoder.layers.encoder_layer_1? permute, cat,",
        ),
        ("mode=split model.name=mlp pipeline.stages=4", "2 pipeline.stages 3"),
        (
            "mode=pipeline nproc=2 plugin=tests.models.unlucky_models model.name=renormalised",
            "layer 1 (Renormalised)",
        ),
        (
            "mode=split plugin=tests.modes.odd_models model.name=Deciding",
            "model.name=Deciding mode=ddp",
        ),
        # Torch wraps what a stage raises; here a layer without a deterministic kernel.
        (
            "mode=pipeline nproc=2 pipeline.microbatches=2 deterministic=true "
            "plugin=tests.models.unlucky_models model.name=scattered",
            "put_ deterministic=false",
        ),
    ],
)
def test_wrong_use_is_answered_in_one_line(words, names, tmp_path):
    completed = trainer("recipe=digits", *words.split(), *QUIET, f"output={tmp_path / 'run'}")
    assert completed.returncode == 2 and len(completed.stderr.splitlines()) == 1, completed.stderr
    assert not [name for name in names.split() if name not in completed.stderr], completed.stderr
    for setting in suggested(completed.stderr):
        assert setting.startswith("nproc=") or load("digits", setting)


@pytest.mark.parametrize(
    ("words", "parts", "norms", "images", "first"),
    [
        ("mode=single batch_size=8", 1, True, None, ""),  # The size is that of the recipe.
        (
            "mode=single batch_size=64 accumulate=8",
            1,
            True,
            8,
            "a larger batch_size, a smaller accumulate,",
        ),
        ("mode=ddp batch_size=64", 8, True, 8, "sync_bn=true, a larger batch_size,"),
        ("mode=ddp batch_size=128", 8, True, None, ""),
        ("mode=ddp batch_size=64", 8, False, None, ""),
        ("mode=ddp batch_size=64 sync_bn=true", 8, True, None, ""),
        (
            "mode=ddp batch_size=64 sync_bn=true accumulate=8",
            8,
            True,
            8,
            "a larger batch_size, a smaller accumulate,",
        ),
        ("mode=local_sgd batch_size=4", 4, True, 1, "a larger batch_size,"),
        (
            "mode=pipeline batch_size=64 pipeline.split_size=8",
            1,
            True,
            8,
            "pipeline.microbatches=4 or fewer,",
        ),
        ("mode=pipeline batch_size=64 pipeline.split_size=8", 4, True, 8, "a larger batch_size,"),
    ],
)
def test_parts_that_are_small_for_batch_norm(words, parts, norms, images, first):
    recipe = load(None, *words.split())
    facts = {"pipeline": {"split_size": recipe.pipeline.split_size}}
    strategy = SimpleNamespace(share=DataShare(0, parts), result_fields=lambda: facts)
    strategy.recipe = recipe
    message = warn_of_small_batch_norm(strategy, norms)
    if images is None:
        assert message is None
    else:
        assert f"over {images} image" in message and message.startswith(f"try {first[:-1]}")


AUTO = [
    "recipe=digits",
    "mode=pipeline",
    "pipeline.microbatches=auto",
    "batch_size=16",
    "max_steps=1",
    *QUIET,
]


@pytest.mark.slow
def test_a_measurement_without_enough_memory_is_not_the_end(tmp_path):
    """A measurement in one process rejects what does not fit: a trial of 4 micro-batches, and
    probes of more than 2 images.
    """
    ok(*AUTO, f"output={tmp_path / 'trial'}", env={"TRAINER_FAULT": "oom@0:trial-4"})
    actual = result(tmp_path / "trial")["pipeline"]
    assert actual["microbatches"] in (6, 8)
    assert {trial["microbatches"] for trial in actual["trials"]} <= {6, 8}
    greedy = ["plugin=tests.models.unlucky_models", "model.name=greedy"]
    output = ok(*AUTO, *greedy, f"output={tmp_path / 'probe'}").stdout
    assert result(tmp_path / "probe")["pipeline"]["microbatches"] == 8
    assert "4, 6 micro-batches" in output
