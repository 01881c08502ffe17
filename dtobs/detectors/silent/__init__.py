"""Errors that no exception reports: wrong numbers, wrong data, wrong randomness."""

from __future__ import annotations

from dtobs.detectors.base import Detector
from dtobs.detectors.silent.averages_apart import averages_apart
from dtobs.detectors.silent.batchnorm_unsynchronized import batchnorm_unsynchronized
from dtobs.detectors.silent.checkpoint_corrupt import checkpoint_corrupt
from dtobs.detectors.silent.checkpoint_failed import checkpoint_failed
from dtobs.detectors.silent.clipped_scaled import clipped_scaled
from dtobs.detectors.silent.config_mismatch import config_mismatch
from dtobs.detectors.silent.corrupted_communication import corrupted_communication
from dtobs.detectors.silent.data_mismatch import data_mismatch
from dtobs.detectors.silent.data_not_resumed import data_not_resumed
from dtobs.detectors.silent.data_overlap import data_overlap
from dtobs.detectors.silent.data_repeat import data_repeat
from dtobs.detectors.silent.data_uneven import data_uneven
from dtobs.detectors.silent.effective_precision import effective_precision
from dtobs.detectors.silent.fp8_saturation import fp8_saturation
from dtobs.detectors.silent.fp16_underflow import fp16_underflow
from dtobs.detectors.silent.frozen_networks import frozen_networks
from dtobs.detectors.silent.gradient_ledger import gradient_ledger
from dtobs.detectors.silent.gradient_nonfinite import gradient_nonfinite
from dtobs.detectors.silent.gradients_kept import gradients_kept
from dtobs.detectors.silent.gradients_lost import gradients_lost
from dtobs.detectors.silent.learning_rate_mismatch import learning_rate_mismatch
from dtobs.detectors.silent.learning_rate_not_scaled import learning_rate_not_scaled
from dtobs.detectors.silent.local_gradient_outlier import local_gradient_outlier
from dtobs.detectors.silent.loss_nonfinite import loss_nonfinite
from dtobs.detectors.silent.loss_weights import loss_weights
from dtobs.detectors.silent.optimizer_stale import optimizer_stale
from dtobs.detectors.silent.own_models import own_models
from dtobs.detectors.silent.recomputation_mismatch import recomputation_mismatch
from dtobs.detectors.silent.replica_divergence import replica_divergence
from dtobs.detectors.silent.resume_mismatch import resume_mismatch
from dtobs.detectors.silent.rng_not_restored import rng_not_restored
from dtobs.detectors.silent.seed_policy import seed_policy
from dtobs.detectors.silent.shared_files import shared_files
from dtobs.detectors.silent.spikes import spikes
from dtobs.detectors.silent.state_changed_at_rest import state_changed_at_rest
from dtobs.detectors.silent.torn_checkpoints import torn_checkpoints
from dtobs.detectors.silent.update_mismatch import update_mismatch
from dtobs.detectors.silent.updates_lost import updates_lost
from dtobs.detectors.silent.weights_not_loaded import weights_not_loaded

DETECTORS: tuple[Detector, ...] = (
    gradient_ledger,
    own_models,
    replica_divergence,
    averages_apart,
    frozen_networks,
    corrupted_communication,
    seed_policy,
    data_overlap,
    data_uneven,
    data_mismatch,
    local_gradient_outlier,
    gradient_nonfinite,
    loss_nonfinite,
    loss_weights,
    gradients_kept,
    gradients_lost,
    clipped_scaled,
    recomputation_mismatch,
    optimizer_stale,
    update_mismatch,
    state_changed_at_rest,
    updates_lost,
    spikes,
    fp16_underflow,
    fp8_saturation,
    config_mismatch,
    effective_precision,
    learning_rate_mismatch,
    learning_rate_not_scaled,
    batchnorm_unsynchronized,
    data_repeat,
    data_not_resumed,
    rng_not_restored,
    resume_mismatch,
    weights_not_loaded,
    checkpoint_corrupt,
    checkpoint_failed,
    shared_files,
    torn_checkpoints,
)
