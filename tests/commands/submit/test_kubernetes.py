"""What `submit kubernetes` writes, held against the published schemas, and read back as the pods would get it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands.submit.schemas import problems
from trainer.commands.submit import command
from trainer.commands.submit.kubernetes import PORT
from trainer.commands.submit.submission import HOPELESS
from trainer.launch.topology import choose_launch
from trainer.recipe import load

ASKED = ["kubernetes", "nproc=8", "cpus=32", "memory=64GiB", "image=registry.example/trainer:1", "claim=training"]
DOLLARS = "$(HOME) $HOME $$ a'b\"c: # \N{SNOWMAN}"


@pytest.fixture
def documents(capsys: pytest.CaptureFixture[str]):
    def write(*words: str) -> dict[str, Any]:
        assert command([*ASKED, *words]) == 0
        found = {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}
        assert [problem for kind, one in found.items() for problem in problems(kind, one)] == []
        return found

    return write


def expanded(words: list[str]) -> list[str]:
    """As Kubernetes expands them, where no variable is set: $$ is $, and $(NAME) stays."""
    return [word.replace("$$", "$") for word in words]


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_words_arrive_as_typed(kind: str, documents) -> None:
    made = documents("recipe=resnet50", f"kind={kind}", f"data.root=/{DOLLARS}", "nodes=2")
    if kind == "job":
        words = made["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
    else:
        words = made["TrainJob"]["spec"]["trainer"]["command"]
    words = expanded(words)
    assert words[:5] == ["env", "--chdir=/work", "python", "-m", "trainer"]
    assert {f"data.root=/{DOLLARS}", "output=/work/runs/resnet50", "resume=auto"} <= {*words}


def test_the_pods_of_a_job_find_each_other(documents) -> None:
    made = documents("recipe=resnet50", "nodes=2", "output=runs/My_Run.2")
    service, job = made["Service"], made["Job"]
    pod = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    variables = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    for index in (0, 1):
        launch = choose_launch({**variables, "JOB_COMPLETION_INDEX": str(index)}, "8", load("resnet50"), lambda: 0, 1)
        assert (launch.node_rank, launch.nnodes, launch.size) == (index, 2, 16)
        assert (launch.master_addr, launch.master_port) == (f"{name}-0.{service['metadata']['name']}", PORT)


def test_a_job_is_tried_again_where_that_helps(documents) -> None:
    spec = documents("recipe=resnet50", "nodes=2", "requeues=3", "grace=100")["Job"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    assert spec["backoffLimit"] == 6 and spec["podReplacementPolicy"] == "Failed"
    rules = spec["podFailurePolicy"]["rules"]
    assert {code for rule in rules if rule["action"] == "FailJob" for code in rule["onExitCodes"]["values"]} == {
        *HOPELESS
    }
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 130 and pod["restartPolicy"] == "Never"


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_volumes(kind: str, documents) -> None:
    made = documents("recipe=resnet50", f"kind={kind}")
    if kind == "job":
        pod = made["Job"]["spec"]["template"]["spec"]
    else:
        patch = made["TrainJob"]["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
        pod = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    mounts = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes[mounts["/work"]]["persistentVolumeClaim"] == {"claimName": "training"}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert pod["terminationGracePeriodSeconds"] == 90


def test_a_train_job(documents) -> None:
    spec = documents("recipe=resnet50", "kind=trainjob", "nodes=2")["TrainJob"]["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "32", "memory": "64Gi", "nvidia.com/gpu": "8"}
    assert not [word for word in trainer["command"] if word.startswith("nproc=")]


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_a_recipe_of_ones_own_travels_along(kind: str, documents, tmp_path: Path) -> None:
    own = tmp_path / "My own.yaml"
    own.write_text("extends: digits\nepochs: 3\n")
    made = documents(f"recipe={own}", f"kind={kind}", "devices=[cpu]")
    text = json.dumps(made)
    (name, content), *others = made["ConfigMap"]["data"].items()
    assert not others and f"recipe=/recipe/{name}" in text and str(own) not in text
    (tmp_path / "again.yaml").write_text(content)
    assert load(str(tmp_path / "again.yaml")).epochs == 3
    assert "nvidia.com/gpu" not in text


def test_the_schemas_refuse(documents) -> None:
    job = documents("recipe=resnet50")["Job"]
    job["spec"]["backofLimit"] = 1
    job["spec"]["completions"] = "2"
    del job["spec"]["template"]
    assert len(problems("Job", job)) == 3
