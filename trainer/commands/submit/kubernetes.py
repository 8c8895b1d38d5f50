"""Manifests for Kubernetes: an Indexed Job with its headless Service, or a TrainJob of Kubeflow Trainer.

A pod is a node and starts that node's ranks. The claim is mounted at /work, which is the folder that relative paths are
relative to.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import yaml

from trainer import recipe
from trainer.commands.submit.submission import HOPELESS, Submission
from trainer.errors import RecipeError
from trainer.recipe import shipped_recipes

HOME = "/work"
RECIPE = "/recipe"
PORT = 29500
TEXT = """\
# {command}
# {use}
# Validated against the published schemas, and never run on a cluster by its authors.
"""


def manifest(submission: Submission) -> str:
    """The file that `kubectl apply -f` takes. Raises RecipeError."""
    folder = PurePosixPath(HOME, submission.output)
    if not folder.is_relative_to(HOME) or ".." in folder.parts or submission.output.startswith("~"):
        raise RecipeError(
            f"output={submission.output} is not on the volume, which is at {HOME} in the pods: write a path below it"
        )
    kind = submission.options.get("kind", "job")
    documents = [_recipe_map(submission)] if _is_own_file(submission) else []
    documents += [_train_job(submission)] if kind == "trainjob" else [_service(submission), _job(submission)]
    use = f"kubectl apply -f FILE; follow: kubectl logs -f {kind}/{submission.name}; end: kubectl delete -f FILE"
    head = TEXT.format(command=submission.comment, use=use)
    return head + yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=1000)


def _is_own_file(submission: Submission) -> bool:
    """Whether the recipe is a file of this machine, which the pods do not have."""
    return _typed_recipe(submission) not in shipped_recipes()


def _typed_recipe(submission: Submission) -> str:
    return next(word.partition("=")[2] for word in submission.words if word.startswith("recipe="))


def _recipe_map(submission: Submission) -> dict[str, Any]:
    text = recipe.load(_typed_recipe(submission)).to_yaml()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": submission.name},
        "data": {f"{submission.name}.yaml": text},
    }


def _command(submission: Submission, nproc: bool) -> list[str]:
    words = [f"nproc={submission.nproc}"] if nproc else []
    for word in submission.words:
        mounted = word.startswith("recipe=") and _is_own_file(submission)
        words.append(f"recipe={RECIPE}/{submission.name}.yaml" if mounted else word)
    words += [f"output={PurePosixPath(HOME, submission.output)}", "resume=auto"]
    start = ["env", f"--chdir={HOME}", "python", "-m", "trainer"]
    return [word.replace("$", "$$") for word in [*start, *words]]  # Kubernetes would expand $(NAME)


def _resources(submission: Submission) -> dict[str, Any]:
    amounts: dict[str, Any] = {"cpu": str(submission.cpus), "memory": submission.memory.removesuffix("B")}
    if submission.gpus:
        amounts["nvidia.com/gpu"] = str(submission.gpus)
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _volumes(submission: Submission) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volumes of a pod, and where they are mounted: the claim, shared memory for loader workers, the recipe."""
    volumes: list[dict[str, Any]] = [
        {"name": "work", "persistentVolumeClaim": {"claimName": submission.options["claim"]}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "work", "mountPath": HOME}, {"name": "shm", "mountPath": "/dev/shm"}]
    if _is_own_file(submission):
        volumes.append({"name": "recipe", "configMap": {"name": submission.name}})
        mounts.append({"name": "recipe", "mountPath": RECIPE})
    return volumes, mounts


def _service(submission: Submission) -> dict[str, Any]:
    """Gives the pods names that the others can find."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": submission.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": submission.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(submission: Submission) -> dict[str, Any]:
    volumes, mounts = _volumes(submission)
    meet = {"NNODES": submission.nodes, "MASTER_ADDR": f"{submission.name}-0.{submission.name}", "MASTER_PORT": PORT}
    container = {
        "name": "node",
        "image": submission.options["image"],
        "command": _command(submission, nproc=True),
        "env": [{"name": name, "value": str(value)} for name, value in meet.items()] if submission.nodes > 1 else [],
        "resources": _resources(submission),
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": submission.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": submission.nodes,
            "parallelism": submission.nodes,
            # One lost node ends the ranks of all, and each of its pods counts.
            "backoffLimit": submission.requeues * submission.nodes,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "node", "operator": "In", "values": list(HOPELESS)},
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "subdomain": submission.name,
                    "terminationGracePeriodSeconds": submission.saving,
                    "containers": [container],
                    "volumes": volumes,
                }
            },
        },
    }


def _train_job(submission: Submission) -> dict[str, Any]:
    """Of Kubeflow Trainer 2.3 or newer, whose torch runtime tells the pods how many there are and where they meet."""
    volumes, mounts = _volumes(submission)
    pod = {
        "terminationGracePeriodSeconds": submission.saving,
        "containers": [{"name": "node", "volumeMounts": mounts}],
        "volumes": volumes,
    }
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": submission.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": submission.options["image"],
                "command": _command(submission, nproc=False),
                "numNodes": submission.nodes,
                "numProcPerNode": submission.nproc,
                "resourcesPerNode": _resources(submission),
            },
            "runtimePatches": [
                {
                    "manager": "trainer/submit",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
                }
            ],
        },
    }
