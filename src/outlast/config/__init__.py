"""The configuration of a run: its sections, how they are read, and how they are checked. Imports no torch."""

from outlast.config.addresses import host_and_port, job_token, lighthouse_address
from outlast.config.checking import MAX_UNITS, check_config
from outlast.config.reading import load_config, new_run_dir, take_config_file, to_toml, with_run_dir
from outlast.config.sections import (
    TRAJECTORY,
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Config,
    Data,
    FaultTolerance,
    Job,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Parallelism,
    Training,
    leaf_values,
    trajectory,
    trajectory_fields,
)

__all__ = [
    "MAX_UNITS",
    "TRAJECTORY",
    "ActivationCheckpoint",
    "Checkpoint",
    "Compile",
    "Config",
    "Data",
    "FaultTolerance",
    "Job",
    "LRScheduler",
    "Metrics",
    "Model",
    "Optimizer",
    "Parallelism",
    "Training",
    "check_config",
    "host_and_port",
    "job_token",
    "leaf_values",
    "lighthouse_address",
    "load_config",
    "new_run_dir",
    "take_config_file",
    "to_toml",
    "trajectory",
    "trajectory_fields",
    "with_run_dir",
]
