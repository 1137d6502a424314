"""Parts that tests of stage replicas share."""

from tests.rigs.pipeline import (
    ADAMW,
    EF,
    make_job,
    with_train,
)

JOBS = {
    "2bw, Muon + EF, clip": make_job(with_train(microbatches=8, reduction_groups=4, clip_norm=0.05), EF),
    "2bw, Muon + EF, 3 groups, no clip": make_job(with_train(microbatches=8, reduction_groups=3, clip_norm=0.0), EF),
    "2bw, AdamW, bfloat16, 7 microbatches": make_job(
        with_train(microbatches=7, reduction_groups=3, clip_norm=0.05, dtype="bfloat16"), ADAMW
    ),
    "1f1b, Muon + EF, clip": make_job(
        with_train(schedule="1f1b", microbatches=8, reduction_groups=4, clip_norm=0.05), EF
    ),
    "1f1b, AdamW, 3 groups, no clip": make_job(
        with_train(schedule="1f1b", microbatches=8, reduction_groups=3, clip_norm=0.0), ADAMW
    ),
    "gpipe, Muon + EF, clip": make_job(
        with_train(schedule="gpipe", microbatches=8, reduction_groups=3, clip_norm=0.05), EF
    ),
    "gpipe, Muon, 4 groups, no clip": make_job(
        with_train(schedule="gpipe", microbatches=8, reduction_groups=4, clip_norm=0.0), EF
    ),
}


REPLICAS = [(2,), (3,), (2, 2), (3, 3), (2, 1, 2), (1, 3, 1), (3, 2), (1, 2)]
