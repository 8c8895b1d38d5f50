"""A plan has the keys that its type tells, and values of these types."""

import pytest

from tests.commands.plan.plans import fixed_speed, of_cnn
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
def test_a_plan_is_what_its_type_tells(mode, options, monkeypatch):
    fixed_speed(monkeypatch)
    found = plan(of_cnn(mode), measured="here" if mode == "ddp" else None, **options)
    assert odd(found, RunPlan) == []
    assert (found["prediction"] is not None and found["advice"] != []) == (mode == "ddp")
    assert (found["pipeline"] is not None) == (mode in ("pipeline", "split"))


def test_what_is_another_is_found():
    found = plan(load_recipe("digits", "mode=single"))
    assert odd({**found, "more": 1}, RunPlan) == ["it: {'more'}"]
    assert odd({**found, "peak": "1"}, RunPlan) == ["it['peak']: '1' is no <class 'int'>"]
    assert odd({**found, "data": {**found["data"], "name": None}}, RunPlan)[0].startswith("it['data']['name']: None")
    assert odd({**found, "modes": [{}]}, RunPlan)[0].startswith("it['modes'][0]: ")
