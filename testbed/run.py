"""The main job: `python -m testbed.run policy=redknot+elastic [key=value ...]`, `-m` for a sweep.

Ends with one table; everything behind it is in the run folder: record.json, report.html, decisions/, wandb/.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from testbed.compose import register


def main() -> None:
    """The command line; one line and exit code 2 for what the user can mend."""
    register()
    from testbed.commands import guarded

    guarded(_hydra_main, "hydra.run.dir or hydra.sweep.dir")


@hydra.main(config_path="pkg://conf", config_name="config", version_base="1.3")
def _hydra_main(cfg: DictConfig) -> None:
    from testbed.commands import job

    hydra_config = HydraConfig.get()
    swapped = [item.lstrip("+") for item in hydra_config.overrides.task]
    swapped = [item[len("policy/") :] for item in swapped if item.startswith(("policy/", "policy."))]
    if swapped:  # a policy with another part is another policy, and its name says so
        cfg.policy.name = " ".join([cfg.policy.name, *swapped])
    job(lambda: run(cfg, Path(hydra_config.runtime.output_dir)))


def run(cfg: DictConfig, folder: Path) -> None:
    """One run into a folder.

    Raises:
        ValueError, RuntimeError, OSError: bad configuration or a run that failed, one line each.
    """
    import torch

    from testbed import summary
    from testbed.experiment import Experiment, write_logs
    from testbed.results import html, table
    from testbed.results.progress import Progress
    from testbed.results.record import Status, save
    from testbed.setup import build, setup

    settings = setup(cfg)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    status: Status = "complete"
    reason = ""
    with Progress() as progress:
        progress.start("loading the model")
        experiment = Experiment(settings, build(cfg.model, "model"), progress)
        try:
            with _on_signals(experiment.interrupt):
                experiment.run()
        except KeyboardInterrupt:
            status, reason = "partial", f"interrupted after {len(experiment.outcomes)} samples"
            if not experiment.outcomes:
                raise
        progress.start("twin and record")
        late: list[bool] = []
        with _on_signals(lambda frame: late.append(True)):  # what is finished is worth these seconds
            if status == "complete" and (idle := summary.idle(experiment)):
                status, reason = "failed", idle
            record = summary.record(experiment, cfg, folder, status, reason)
            path = save(record, folder)
            write_logs(experiment.outcomes, folder / "decisions")
        record = settings.tracker.publish(record, path)
    table.show(record)
    print(f"record: {path}")
    html.write(record, folder / "report.html")
    if status == "partial" or late:
        raise KeyboardInterrupt
    if status == "failed":
        raise summary.ActivityError(reason)


@contextmanager
def _on_signals(act: Callable[[FrameType | None], None]) -> Iterator[None]:
    """What Ctrl-C and a polite kill do meanwhile."""

    def handle(number: int, frame: FrameType | None) -> None:
        act(frame)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[func-returns-value]
