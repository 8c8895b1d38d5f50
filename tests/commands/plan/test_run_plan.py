"""A plan has the keys that its type tells, and values of these types."""

import pytest

from tests.commands.plan.plans import of_cnn, run_folder
from tests.typed import odd
from trainer import load_recipe, plan
from trainer.commands.plan.run_plan import RunPlan


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("ddp", {"nproc": 2, "memory": "16MiB", "bandwidth": "1GB/s", "every": True}),
        ("pipeline", {"nproc": 2, "memory": "24GiB"}),
        ("local_sgd", {"nproc": 2}),
        ("split", {}),
    ],
)
def test_a_plan_is_what_its_type_tells(mode, options, tmp_path):
    found = plan(of_cnn(mode), measured=run_folder(tmp_path / "run") if mode == "ddp" else None, **options)
    assert odd(found, RunPlan) == []
    assert (found["prediction"] is not None and found["scaling"] != [] and found["advice"] != []) == (mode == "ddp")
    assert (found["pipeline"] is not None) == (mode in ("pipeline", "split"))


def test_what_is_another_is_found():
    found = plan(load_recipe("digits", "mode=single"))
    assert odd({**found, "more": 1}, RunPlan) == ["it: {'more'}"]
    assert odd({**found, "peak": "1"}, RunPlan) == ["it['peak']: '1' is no <class 'int'>"]
    assert odd({**found, "data": {**found["data"], "name": None}}, RunPlan)[0].startswith("it['data']['name']: None")
    assert odd({**found, "modes": [{}]}, RunPlan)[0].startswith("it['modes'][0]: ")
