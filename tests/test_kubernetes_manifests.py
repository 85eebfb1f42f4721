"""The manifests in ``deploy/kubernetes`` are valid for Kubernetes, JobSet and Kubeflow: each field has a name and a
type of their published schemas. Their other content is consistent, also with Shoal."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import run
from shoal.config import NAMES

FOLDER = Path(__file__).parent.parent / "deploy" / "kubernetes"
yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.timeout(180)  # the schemas are hundreds of modules
FILES = sorted(FOLDER.glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def check(document: dict[str, Any]) -> None:
    """Raise where one document is not what its controller takes."""
    kind = document["kind"]
    if kind == "JobSet":
        check_as("jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet", document)
        for job in document["spec"]["replicatedJobs"]:
            check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job["template"]})
    elif kind == "TrainJob":
        check_as("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob", document)
    elif kind == "PyTorchJob":
        training = pytest.importorskip("kubeflow.training.models")
        assert document["apiVersion"] == "kubeflow.org/v1"
        check_fields(training, "KubeflowOrgV1PyTorchJob", document, kind)
        for replica in document["spec"]["pytorchReplicaSpecs"].values():
            check(
                {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": replica["template"]}
            )
    else:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def check_as(module: str, name: str, document: dict[str, Any]) -> None:
    """By a model of Kubeflow Trainer's, which ignores fields that it does not know: all must come back."""
    pytest.importorskip("kubeflow_trainer_api")
    model = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), name)
    known = model.from_dict(document).to_dict()
    assert not list(lost(document, known, document["kind"]))


def lost(document: object, known: object, where: str) -> Iterator[str]:
    if isinstance(document, dict):
        assert isinstance(known, dict), where
        for key, value in document.items():
            if key in known:
                yield from lost(value, known[key], f"{where}.{key}")
            elif value != {}:
                yield f"{where}.{key}"
    elif isinstance(document, list):
        assert isinstance(known, list) and len(known) == len(document), where
        for one, other in zip(document, known, strict=True):
            yield from lost(one, other, where)


def check_fields(models: Any, name: str, document: Any, where: str) -> None:
    """Check the fields against a model of the training operator, which itself checks only for missing ones."""
    if match := re.fullmatch(r"(?:dict\(str, |list\[)(.*)[)\]]", name):
        for key, one in document.items() if isinstance(document, dict) else enumerate(document):
            check_fields(models, match[1], one, f"{where}.{key}")
    elif name in ("str", "int", "bool", "float"):
        assert type(document).__name__ == name, f"{where}: {document!r} is no {name}"
    elif hasattr(models, name):
        model = getattr(models, name)
        attributes = {key: attribute for attribute, key in model.attribute_map.items()}
        assert set(document) <= set(attributes), where
        model(**{attributes[key]: value for key, value in document.items()})
        for key, value in document.items():
            check_fields(models, model.openapi_types[attributes[key]], value, f"{where}.{key}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_manifest_is_accepted_by_its_controllers_schema(path: Path) -> None:
    for document in documents(path):
        check(document)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_wrong_field_or_type_is_detected(path: Path) -> None:
    """The check above can fail: in each document, with an unknown field, and with another type."""
    for document in documents(path):
        for spoil in ({"completons": 3}, {next(iter(document["spec"])): ["no such thing"]}):
            with pytest.raises(Exception):  # noqa: B017 - each schema has an error of its own
                check({**document, "spec": {**document["spec"], **spoil}})


def containers(value: object) -> Iterator[dict[str, Any]]:
    """Every container: a mapping with an image."""
    if isinstance(value, dict):
        if "image" in value:
            yield value
        for one in value.values():
            yield from containers(one)
    elif isinstance(value, list):
        for one in value:
            yield from containers(one)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_container_gets_the_secret_from_a_secret_and_only_existing_variables(path: Path) -> None:
    results = [one for document in documents(path) for one in containers(document)]
    assert results
    for container in results:
        variables = {one["name"]: one for one in container["env"]}
        assert "value" not in variables["SHOAL_SECRET"]
        assert variables["SHOAL_SECRET"]["valueFrom"]["secretKeyRef"] == {"name": "shoal", "key": "secret"}
        assert {name for name in variables if name.startswith("SHOAL_")} <= set(NAMES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_command_is_valid_for_shoal_run_and_uses_the_first_pods_address(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse

    for document in documents(path):
        for container in containers(document):
            monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
            command = [*container["command"], *container.get("args", [])]
            assert command[:2] == ["shoal", "run"]
            parser = argparse.ArgumentParser(exit_on_error=False)
            run.add_arguments(parser)
            args = parser.parse_args(command[2:])
            assert args.script == "train.py"
            if document["kind"] == "Job":
                spec = document["spec"]
                assert args.nnodes == spec["completions"] == spec["parallelism"]
                assert (
                    args.rendezvous == f"{document['metadata']['name']}-0.{spec['template']['spec']['subdomain']}:29400"
                )
            elif document["kind"] == "JobSet":
                (job,) = document["spec"]["replicatedJobs"]
                name = document["metadata"]["name"]
                assert args.nnodes == job["template"]["spec"]["completions"]
                assert args.rendezvous == f"{name}-{job['name']}-0-0.{name}:29400"
            else:  # what its controller sets says it
                assert (args.nnodes, args.rendezvous) == (None, None)
            if document["kind"] != "TrainJob":
                assert args.grace < container_grace(document)


def container_grace(value: object) -> float:
    """The shortest time that a pod has to end."""
    if isinstance(value, dict):
        inside = [container_grace(value) for value in value.values()]
        return float(min([value.get("terminationGracePeriodSeconds", float("inf")), *inside]))
    return (
        min([container_grace(one) for one in value], default=float("inf")) if isinstance(value, list) else float("inf")
    )
