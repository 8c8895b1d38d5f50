"""Odd models in every mode: each trains like in mode=single, or is refused with a sentence.

None trains another model without a word, and none ends by a traceback or a signal.
"""

import json
import re
import sys

import pytest
import torch

from tests import warm
from tests.command_line import environment
from tests.modes.odd_models import HIDDEN_STATE, ODD, ComplexParameter, ExtraState, Lazy
from tests.modes.ways import ONE_PROCESS
from tests.modes.zoo_runs import LATER, WAYS, alone, verdict

FINE = re.compile("equal|refused: ")
HIDDEN = ",".join(HIDDEN_STATE)
SEVERAL = (
    "Plain,ParameterHooks,AccumulatedHook,Tied,Unused,Spectral,"
    "MixedPrecision,MixedHalf,Normed,OwnTrain,Gained"
)
# Plugins that are loaded with all models.
MODELS = {
    "1f1b": SEVERAL,
    "sync_bn": SEVERAL,
    LATER: "Plain,TwoWays,Unused,MixedHalf",
}
MUST_TRAIN = {  # A refusal of these models would be an error.
    "split": "Plain,OwnTrain,Normed,RootHook,RootHookBefore,InnerHook,InnerBackwardHook,"
    "ParameterHooks,Spectral,"
    "WeightNormed,Tied,Dropped,Gained,Scripted",
    "streams": (
        "Plain,InnerHook,WeightNormed,Tied,Twice,Unused,MixedPrecision,Dropped,Gained,Scripted"
    ),
    "dp": ",".join(
        set(ODD)
        - {Lazy.__name__, ComplexParameter.__name__, ExtraState.__name__, "CountedByGenerator"}
    ),
    "gpipe": (
        "Plain,WeightNormed,Tied,Twice,Unused,MixedPrecision,MixedHalf,InPlace,"
        "Pruned,Dropped,Gained,Scripted"
    ),
    "ddp": "Plain,NoGrad,ParameterHooks,AccumulatedHook,RootHook,Captured,Reversed,Spectral,"
    "Pruned,SinglePart,"
    f"AnnealedGain,Gained,Scripted,CountedInScript,OwnCall,{HIDDEN}",
    "fsdp": "Plain,NoGrad,OwnTrain,RootHook,Reversed,Checkpointed,WeightNormed,Tied,Unused,"
    "MixedPrecision,SinglePart,"
    f"AnnealedGain,Gained,OwnCall,{HIDDEN}",
    LATER: "Plain,Unused,MixedHalf",
}


def faults(way, verdicts):
    """Return the result of each model that is not as expected."""
    must = MUST_TRAIN.get(way, "").split(",")
    return {
        name: message
        for name, message in verdicts.items()
        if not FINE.match(message) or (name in must and not message.startswith("equal"))
    }


# sync_bn goes through ddp too, split and streams through stages.
LONG = (
    "1f1b",
    "ddp",
    "fsdp",
    "gpipe",
)


@pytest.fixture
def here(monkeypatch):
    """Train within this process as the only rank, and restore the number of threads."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NPROC", "1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# Every second kind, in their order: `--slow` has all of them.
SAMPLE = [*ODD][::2]


@pytest.mark.slow(
    cases=[
        "InPlace",
        "CountedInObject",
        "NumpyDrawsInBlock",
        "RootHookBefore",
        "Captured",
        "RunningCentre",
        "AnnealedMomentum",
        "Quantised",
        "Gained",
        "CountedInScript",
        "Detached",
        "Clamped",
        "OwnTrain",
        "Pruned",
        "Counted",
        "Unused",
        "CountedInEvaluation",
        "ParameterHooks",
        "InnerHook",
        "CountedByIterator",
        "Plain",
        "CountedInCounter",
        "Reversed",
        "Spectral",
        "Routed",
        "Checkpointed",
        "ScalarParameter",
        "CountedInGlobal",
        "CountedInClosure",
        "Dropped",
    ]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in SAMPLE)) for name in ODD]
)
def test_an_odd_model_trains_in_one_process_like_single_or_is_refused(name, here, tmp_path):
    reference = alone(name, ["mode=single"], tmp_path / "single")
    assert isinstance(reference, dict), reference
    for way, words in {**ONE_PROCESS, "recompute": ["mode=single", "recompute=true"]}.items():
        actual = alone(name, words, tmp_path / way)
        assert (
            faults(
                way,
                {
                    name: actual
                    if isinstance(actual, str)
                    else verdict(name, way, actual, reference)
                },
            )
            == {}
        ), way


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way, marks=pytest.mark.full("half a minute each") if way in LONG else pytest.mark.slow
        )
        for way in WAYS
        if way not in ONE_PROCESS
    ],
)
def test_over_ranks_an_odd_model_trains_as_in_single_or_is_refused(way, tmp_path):
    command = [
        sys.executable,
        "-m",
        "tests.modes.zoo_runs",
        str(tmp_path),
        way,
        *filter(None, [MODELS.get(way)]),
    ]
    completed = warm.run(
        command, env=environment(NPROC="1"), capture_output=True, text=True, timeout=500
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    verdicts = json.loads((tmp_path / f"{way}.json").read_text())
    assert faults(way, verdicts) == {}
    if way in ("fsdp", LATER):  # two blocks of one size: each rank would compute with the other one
        assert verdicts["TwoWays"].startswith("refused: ") and "mode=ddp" in verdicts["TwoWays"]
