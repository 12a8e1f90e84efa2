"""Context parallelism, one process a rank; the same cases on threads are in test_matrix.py."""

import json
import sys

import pytest
import torch

from torch_impl.context_parallel.communicator import Watch
from torch_impl.launch import spawn


def run(ranks, mode, stride=1, worlds=(1,), deadline_s=120):
    """The answers of all ranks; none may say that anything is wrong."""
    command = [sys.executable, "-m", "tests.torch_impl.context_parallel.rank_worker", mode, str(stride),
               ",".join(map(str, worlds))]
    answers = [json.loads(said.splitlines()[-1]) for said in spawn(command, ranks, deadline_s=deadline_s)]
    wrong = [line for answer in answers for line in answer["wrong"]]
    assert not wrong, "\n".join(wrong)
    assert all(answer["count"] > 0 for answer in answers)
    return answers


def test_collectives_and_sampled_matrix():
    """One job of four: the checks of rank_worker.py, then worlds of 1, 2, 3 and 4 ranks while the others go on."""
    for answer in run(4, "all", stride=12, worlds=(1, 2, 3, 4)):
        assert answer["count"] > 20


def test_the_watch_ends_before_the_interpreter_does():
    """A daemon thread inside torch at that time aborts the process: rows were there, and the job counted as lost."""
    watch = Watch(0, 60.0)
    watch.begin("some step", (), lambda: True)
    watch.close()
    assert not watch._thread.is_alive()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_collectives_and_matrix_on_two_gpus():
    """The same over NCCL, with the GPU's kernels."""
    run(2, "all", stride=3, worlds=(1, 2), deadline_s=250)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_full_matrix():
    """Five schemes x fourteen masks x worlds of 1, 2, 3, 4, 8 processes."""
    run(8, "matrix", worlds=(1, 2, 3, 4, 8), deadline_s=1100)
