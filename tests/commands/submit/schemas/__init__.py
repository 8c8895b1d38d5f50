"""The published schemas of Kubernetes and Kubeflow Trainer; README.md says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

_ALL = json.loads((Path(__file__).parent / "kubernetes.json").read_text())


def problems(kind: str, document: Any) -> list[str]:
    """What is wrong with a document of this kind: Job, TrainJob, Service, ConfigMap, or the `status` of a TrainJob."""
    schema = {**_ALL["kinds"][kind], "$defs": _ALL["$defs"]}
    found = Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]
