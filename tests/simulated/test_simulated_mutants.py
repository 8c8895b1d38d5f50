"""Each line that waits for a device is needed: without it, the simulated devices report an
error.
"""

import time

import pytest
import torch

from tests.simulated.simcuda import simulated, sources
from tests.simulated.simcuda.runs import MEASURING
from tests.simulated.simcuda.scenes import (
    CARD,
    Wrong,
    broken,
    communicated,
    compared,
    copied,
    costs,
    held,
    hung,
    pipelined,
    probed,
    proved,
    recorded,
    saved,
    sent,
    sharded,
    timed,
    tried,
)

# Scenes that need the waits of each file.


USES = {
    "devices/cuda_graphs.py": [recorded],
    "devices/health.py": [hung, compared],
    "models/balance.py": [costs],
    "data/photos/copies.py": [copied],
    "telemetry/clocks.py": [timed, communicated, probed, saved],
    "training/snapshots.py": [saved],
    "training/diagnosis.py": [held],
    "commands/plan/speed_probe.py": [probed],
    "commands/prove/prove_probe.py": [proved],
    "commands/trials/measuring.py": [proved],
    "pool/transport.py": [sent],
    "pool/worker.py": [broken],
    "modes/measures.py": [communicated],
    "modes/ddp.py": [communicated],
    "modes/fsdp.py": [sharded],
    "modes/pipeline/timeline.py": [pipelined],
    "modes/pipeline/stages.py": [tried],
    "modes/pipeline/streams.py": [pipelined],
}


# Waits that no simulation needs, each with its reason.
OF_CARDS = {
    "devices/cuda_graphs.py StepRecorder.record: "
    "torch.cuda.synchronize(self.device)": "as torch before a capture",
    "devices/cuda_graphs.py StepRecorder._recover: "
    "torch.cuda.synchronize(self.device)": "after a driver's error",
    "processes/torch_context.py plain_context: "
    "torch.cuda.current_stream().synchronize()": "of a caller's own stream",
    # The backward pass of a middle stage may still read its input, because nothing goes back to a
    # frozen stage before it.
    "modes/pipeline/streams.py Edge.order_passes: "
    "stream.wait_stream(self.target.stream)": "of three cards and more",
    "modes/pipeline/streams.py Edge.order_passes: "
    "self.source.stream.wait_stream(self.streams[0])": "likewise",
}


def wrong(use):
    """Return the error of a part of the program on simulated devices, if any."""
    with simulated(3) as machine:
        machine.waits.measuring = MEASURING
        try:
            use(machine)
        except (Wrong, RuntimeError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        return machine.errors[0] if machine.errors else None


@pytest.mark.slow(cases=["pipelined"])
@pytest.mark.parametrize(
    "use", sorted({use for uses in USES.values() for use in uses}, key=lambda use: use.__name__)
)
def test_the_program_has_no_errors_on_simulated_devices(use):
    assert wrong(use) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [p for p in sources.ordering() if p.name not in OF_CARDS], ids=lambda p: p.name
)
def test_a_wait_that_is_left_out_is_found(place):
    assert place.file in USES, f"{place.name} waits for a device: give it a use here that needs it"
    with sources.without(place):
        assert any(map(wrong, USES[place.file])), f"nothing needs {place.name}, line {place.line}"


def test_waits_that_only_cards_need_are_there():
    assert {place.name for place in sources.ordering()} >= OF_CARDS.keys()


def test_a_flag_on_the_card_reaches_an_optimizer_on_the_host_too_late():
    assert wrong(lambda machine: sharded(machine, CARD))


def test_clocks_are_read_on_idle_devices_only():
    with simulated(1) as machine:
        machine.waits.measuring = MEASURING
        torch.ones(3, device=CARD)
        time.perf_counter()  # not the project's
        assert machine.errors == []
