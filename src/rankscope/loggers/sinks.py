"""Trackers: W&B, MLflow, TensorBoard, trackio. Each reads its own settings, as in a training."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NS_PER_MS, NS_PER_S

from .otlp import OtlpSink
from .records import PREFIX, level_of, need

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankscope.analysis.report.report import Finding

    from .records import Diagnosis, LoggedStep, Sink, Target

MAX_BATCH = 1000
"""Values of one request. Source: the limit of MLflow's `log-batch`."""

MAX_TAG = 5000
"""Characters of a tag. Source: what MLflow guarantees of all backends (`MlflowClient.set_tag`)."""

PROJECT = "rankscope"
"""Project or experiment, if the tracker's own settings name none."""


class WandbSink:
    """W&B, also offline (``WANDB_MODE=offline``). `into` is the id of a run.

    Of a run that is given, it is a second writer in the mode `shared`, so that a training can write
    into it at the same time. W&B has no such mode offline.
    """

    def __init__(self, target: Target) -> None:
        wandb = need("wandb", "wandb")
        name = f"{target.run}\0{target.started_ns}"
        own = hashlib.sha256(name.encode()).hexdigest()[:16]
        self.into = target.into or own
        is_offline = os.environ.get("WANDB_MODE", "online") != "online"
        is_second = self.into != own and not is_offline
        options: dict[str, Any] = {
            # Those of this process say nothing of the training.
            "x_disable_stats": True,
            "disable_git": True,
            "console": "off",
        }
        if is_second:
            options |= {
                "mode": "shared",
                "x_primary": False,
                "x_update_finish_state": False,
                "x_label": PROJECT,
            }
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.into,
            name=target.run if self.into == own else None,
            resume=None if is_second or is_offline else "allow",
            settings=wandb.Settings(**options),
        )
        # Steps of its own: those of the training are W&B's count of its calls.
        self._run.define_metric(f"{PREFIX}step")
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def log_steps(self, steps: Sequence[LoggedStep]) -> None:
        """Write each step as a row."""
        for step in steps:
            self._run.log({f"{PREFIX}step": step.step, **step.values()})

    def log_diagnosis(self, diagnosis: Diagnosis, new: Sequence[Finding]) -> None:
        """Put verdict and link into the summary."""
        self._run.summary.update(
            {
                f"{PREFIX}verdict": diagnosis.verdict,
                f"{PREFIX}severity": str(diagnosis.severity),
                f"{PREFIX}link": diagnosis.link,
            }
        )

    def close(self, *, has_ended: bool) -> None:
        """Wait until all is sent."""
        self._run.finish()


class MlflowSink:
    """MLflow: a server, a database or a folder (``MLFLOW_TRACKING_URI``). `into` is a run's id.

    Values have the time of their step, so MLflow stores one that is sent again only once.
    """

    def __init__(self, target: Target) -> None:
        mlflow = need("mlflow", "mlflow-skinny")
        self._entities = need("mlflow.entities", "mlflow-skinny")
        self._client = mlflow.MlflowClient()
        self._end_ms: int | None = None
        if target.into:
            self.into = str(self._client.get_run(target.into).info.run_id)
            self._is_own = f"{PROJECT}.run" in self._client.get_run(self.into).data.tags
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        run = self._client.create_run(
            self._client.create_experiment(name) if found is None else found.experiment_id,
            run_name=target.run,
            start_time=target.started_ns // NS_PER_MS or None,
            tags={f"{PROJECT}.run": target.run},
        )
        self.into, self._is_own = str(run.info.run_id), True

    def log_steps(self, steps: Sequence[LoggedStep]) -> None:
        """Write the values of each step as metrics."""
        metrics = [
            self._entities.Metric(name, value, step.end_ns // NS_PER_MS, step.step)
            for step in steps
            for name, value in step.values().items()
        ]
        for begin in range(0, len(metrics), MAX_BATCH):
            self._client.log_batch(self.into, metrics=metrics[begin : begin + MAX_BATCH])
        self._end_ms = steps[-1].end_ns // NS_PER_MS

    def log_diagnosis(self, diagnosis: Diagnosis, new: Sequence[Finding]) -> None:
        """Set tags and, of a run that is only rankscope's, the description."""
        tags = {
            f"{PROJECT}.verdict": diagnosis.verdict,
            f"{PROJECT}.severity": str(diagnosis.severity),
            f"{PROJECT}.link": diagnosis.link,
        }
        if self._is_own:
            tags["mlflow.note.content"] = diagnosis.to_markdown()
        for name, text in tags.items():
            self._client.set_tag(self.into, name, text[:MAX_TAG])

    def close(self, *, has_ended: bool) -> None:
        """End the run if it is rankscope's, and over."""
        if self._is_own and has_ended:
            self._client.set_terminated(self.into, end_time=self._end_ms)


class TensorBoardSink:
    """Event files, without torch. `into` is the log folder of a training, or a new one.

    They are in a folder of their own in it: of several files in one folder, TensorBoard reads only
    the newest while a run is written.
    """

    def __init__(self, target: Target) -> None:
        package = "tensorboard"
        self._events = need("tensorboard.compat.proto.event_pb2", package)
        self._scalar = need("tensorboard.plugins.scalar.summary_v2", package).scalar_pb
        self._text = need("tensorboard.plugins.text.summary_v2", package).text_pb
        writer = need("tensorboard.summary.writer.event_file_writer", package).EventFileWriter
        self.into = str(Path(target.into or f"runs/{target.run}").absolute())
        self._writer = writer(str(Path(self.into) / PROJECT))

    def log_steps(self, steps: Sequence[LoggedStep]) -> None:
        """Write scalars."""
        for step in steps:
            for name, value in step.values().items():
                self._add(step.step, step.end_ns, self._scalar(name, value))
        self._writer.flush()

    def log_diagnosis(self, diagnosis: Diagnosis, new: Sequence[Finding]) -> None:
        """Write a text at the newest step."""
        text = self._text(f"{PREFIX}verdict", diagnosis.to_markdown())
        self._add(max(diagnosis.step, 0), diagnosis.at_ns, text)
        self._writer.flush()

    def close(self, *, has_ended: bool) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, step: int, at_ns: int, summary: object) -> None:
        event = self._events.Event(wall_time=at_ns / NS_PER_S, step=step, summary=summary)
        self._writer.add_event(event)


class TrackioSink:
    """Trackio, local or a Space by its own variables. `into` is ``PROJECT/RUN``."""

    def __init__(self, target: Target) -> None:
        self._trackio = need("trackio", "trackio")
        self.into = target.into or f"{PROJECT}/{target.run}"
        project, _, name = self.into.partition("/")
        self._run = self._trackio.init(
            project=project,
            name=name or target.run,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_steps(self, steps: Sequence[LoggedStep]) -> None:
        """Write each step as a row."""
        for step in steps:
            self._run.log(step.values(), step=step.step)

    def log_diagnosis(self, diagnosis: Diagnosis, new: Sequence[Finding]) -> None:
        """Raise an alert with the verdict and the link."""
        level = self._trackio.AlertLevel[level_of(diagnosis.severity)]
        self._run.alert(diagnosis.verdict, text=diagnosis.link, level=level)

    def close(self, *, has_ended: bool) -> None:
        """Wait until all is written."""
        self._run.finish()


SINKS: Mapping[str, Callable[[Target], Sink]] = {
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "tensorboard": TensorBoardSink,
    "trackio": TrackioSink,
    "otlp": OtlpSink,
}
"""The trackers by the names that ``--to`` takes."""
