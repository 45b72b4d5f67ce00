"""A decode worker's real compute loop without sockets: a gateway's requests are in its mailbox before it begins."""

import os
import select
import statistics
import threading
import time
from typing import Any

import torch

from kvrelay.bench.load import Load
from kvrelay.bench.overheads_parts import Step, StepClock, timed
from kvrelay.config import WorkerSettings
from kvrelay.decode.worker import build
from kvrelay.encoding import encode
from kvrelay.mailbox import FromGateway, Mailbox, Stop, ToGateway
from kvrelay.messages import GenerateRequest, Message, RequestFailed, StepOutput
from kvrelay.model.served import load_served
from kvrelay.process import new_incarnation
from kvrelay.transfer.ports import Inlet
from kvrelay.types import SamplingParams

GATEWAY = 1  # its incarnation


def pin(num_threads: int) -> None:
    """Computes on so many threads from here on, on as many cores: as `kvrelay up` has it, if it is one."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_threads])
    torch.set_num_threads(num_threads)


class StepLoop:
    """One loaded model, and a new worker around it for each load."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Loads the model for as many threads as torch has.

        Raises:
            StartError: the model or the machine does not allow it.
        """
        self._settings = settings
        self._runner, self._served = load_served(settings)

    def run(self, load: Load, temperature: float) -> list[Step]:
        """All requests of a load, which are there at once; gives the steps in which every one of them decoded.

        Raises:
            RuntimeError: a request failed, or no step had all of them in it.
        """
        clock, mailbox, incarnation = StepClock(time.perf_counter), Mailbox(), new_incarnation()
        runner = timed(self._runner, clock)
        inlet = Inlet(runner.kv_cache, self._served.layout)
        worker = build(self._settings, runner, self._served, incarnation, mailbox, inlet)
        for index, prompt in enumerate(load.prompts()):
            mailbox.deliver(FromGateway(GATEWAY, _request(index, prompt, load.output_len, temperature)))
        control = ControlStandIn(mailbox, load.num_requests)
        thread = threading.Thread(target=control.run, name="control", daemon=True)
        thread.start()
        worker.loop()
        thread.join()
        mailbox.close()
        steps = [step for step in clock.steps if step.decodes and step.num_sequences == load.num_requests]
        if control.num_left or control.failures or not steps:
            raise RuntimeError(
                f"{len(steps)} steps had all {load.num_requests} sequences in them, and {control.num_left} did not "
                f"end; make answers longer or sequences fewer. {' '.join(control.failures)}"
            )
        return steps

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self._served.vocab_size


class ControlStandIn:
    """Takes orders as the control thread does, up to the bytes for a socket, and stops the worker after the last one.

    It shares the interpreter's lock with the compute thread, as the real one does.
    """

    def __init__(self, mailbox: Mailbox, num_requests: int) -> None:
        self._mailbox = mailbox
        self.num_left = num_requests
        self.failures: list[str] = []

    def run(self) -> None:
        """Until every request has ended."""
        try:
            while self.num_left:
                self._wait()
                for order in self._mailbox.orders():
                    if isinstance(order, ToGateway):
                        encode(order.message)
                        self._note(order.message)
        finally:
            self._mailbox.deliver(Stop())

    def _wait(self) -> None:
        patience_s = None if self._mailbox.fall_asleep() else 0.0
        ready, _, _ = select.select([self._mailbox.wake_socket], [], [], patience_s)
        self._mailbox.get_up()
        if ready:
            self._mailbox.wake_socket.recv(4096)

    def _note(self, message: Message) -> None:
        if isinstance(message, StepOutput):
            self.num_left -= sum(output.finish_reason is not None for output in message.outputs)
        elif isinstance(message, RequestFailed):
            self.num_left -= 1
            self.failures.append(message.message)


def figures(steps: list[Step]) -> dict[str, Any]:
    """The medians of the parts of a step in ms, their sum, and what is outside kernels: sampling and the rest."""
    kernels_ms = 1000 * statistics.median(step.kernels_s for step in steps)
    sampling_ms = 1000 * statistics.median(step.sampling_s for step in steps)
    rest_ms = 1000 * statistics.median(step.rest_s for step in steps)
    outside_ms = sampling_ms + rest_ms
    step_ms = kernels_ms + outside_ms
    return {
        "steps": len(steps),
        "step_ms": step_ms,
        "kernels_ms": kernels_ms,
        "sampling_ms": sampling_ms,
        "rest_ms": rest_ms,
        "outside_ms": outside_ms,
        "outside_percent": 100 * outside_ms / step_ms,
    }


def _request(index: int, prompt: list[int], max_tokens: int, temperature: float) -> GenerateRequest:
    return GenerateRequest(
        source=GATEWAY,
        request_id=f"r{index}",
        attempt=0,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index, ignore_eos=True),
    )
