"""The engine behind asyncio, for servers: many requests at once from one event loop, streamed as they advance.

One thread calls the engine: it steps while there is work and sleeps while there is none. Requests come in and go out
between two steps. After a step the thread notes how far each request has come, and has the event loop woken once for
all readers; each of them then makes its own output of the newest state. So a slow reader skips states, nothing piles
up, and what reading costs is not in the way of the next step.

Who writes what: the event loop's side `_arrivals`, `_leavers` and each stream's `waiter` and `abandoned`; the step's
thread all that the engine owns and the rest of each stream. `_work` guards what both change.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import TracebackType

from jaxpaged.beam_completion import BeamCompletion
from jaxpaged.completion import Completion
from jaxpaged.engine import Engine
from jaxpaged.outputs import RequestOutput
from jaxpaged.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]

_LET_IN_SECONDS = 0.004
"""Most time that requests are let in between two steps: while a step runs, the device has no need of the host for
longer than that, and a burst of arrivals must not make it wait."""
_LONG_TEXT = 4096
"""Characters from which on a prompt is tokenised in a thread, so that the event loop goes on meanwhile."""
_LAST_STEP_SECONDS = 60.0
"""How long a step may still take when the engine is to stop, before it is given up."""
_IDLE_SECONDS = 1.0
"""How long the thread sleeps before it looks whether its event loop was closed, which nothing tells it."""


class EngineDeadError(RuntimeError):
    """The engine's step failed, and no request is served any more; `__cause__` is what it raised."""


class EngineClosedError(RuntimeError):
    """The engine takes no new requests: it is shutting down, or was never started."""


class AsyncEngine:
    """Serves the coroutines of one event loop from a thread of its own.

    The engine belongs to it from `start` to the end of `shutdown`: nobody else may step it. Where the event loop is
    closed without a `shutdown`, what still runs is aborted and the thread ends by itself within a second or a step.

    Example:
      >>> async with AsyncEngine(LLM(model="demo").engine) as engine:
      ...     async for output in engine.generate("The capital of France is"):
      ...         print(output.outputs[0].text)
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended.set_running_or_notify_cancel()  # who gives up waiting for the end doesn't call it off
        self._work = threading.Condition()
        self._closed = False
        self._dead_error: BaseException | None = None
        self._ids = map("request-{}".format, itertools.count())
        self._streams: dict[str, _Stream] = {}  # all that have not ended
        self._arrivals: deque[_Stream] = deque()
        self._leavers: list[_Stream] = []
        self._news: set[_Stream] = set()  # those whose readers have something new
        self._waking = False  # whether the event loop has been asked to wake them
        self._last_step_at = time.monotonic()
        self._idle = True

    def start(self) -> None:
        """Starts the thread; call it in the event loop that will use the engine.

        Raises:
          RuntimeError: it was started before, or no event loop runs.
        """
        if self._thread is not None or self._closed:
            raise RuntimeError("an AsyncEngine is started once; make another on the same engine")
        self._loop = asyncio.get_running_loop()
        self._last_step_at = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="jaxpaged-engine", daemon=True)
        self._thread.start()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Takes no more requests, lets those that run end, and stops the thread.

        May be called in any event loop, also after that of `start` has ended.

        Args:
          timeout: seconds after which what still runs is aborted, its readers get what has come so far with
            `finish_reason` "abort"; 0 aborts at once, None waits as long as it takes.

        Raises:
          TimeoutError: the engine hangs in a step.
        """
        with self._work:
            self._closed = True
            self._work.notify()
        if self._thread is None:
            return
        if not await self._ends_within(timeout):
            self._abort_all()
            if not await self._ends_within(_LAST_STEP_SECONDS):
                raise TimeoutError(f"the engine hangs: its last step has not returned for {self.stalled_for:.0f} s")
        self._thread.join()

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(timeout=None if error is None else 0)

    @property
    def is_alive(self) -> bool:
        """Whether requests are served: started, not dead, and not at the end of a shutdown."""
        return self._thread is not None and self._thread.is_alive() and self._dead_error is None

    @property
    def dead_error(self) -> BaseException | None:
        """What ended the engine, if it died."""
        return self._dead_error

    @property
    def last_step_at(self) -> float:
        """When a step last returned, or the engine was last given work after a pause: in `time.monotonic` seconds."""
        return self._last_step_at

    @property
    def stalled_for(self) -> float:
        """Seconds that the engine has been at its present step, 0 while there is nothing to do."""
        return 0.0 if self._idle else time.monotonic() - self._last_step_at

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, whether they run or wait."""
        return len(self._streams)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        only_final: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt and yields the request as far as it has come, whenever it has advanced.

        The request begins, and its errors come, with the first item. Every item is a whole `RequestOutput`; a reader
        that is slower than the engine finds several tokens more in the next one. The last item has `finished` set.
        Closing the iterator, or cancelling the task that waits for it, ends the request before the next step.

        Args:
          prompt: text, or token ids.
          sampling_params: how to sample; the defaults if None.
          request_id: unique among the requests that have not ended; one is made if None.
          cache_salt: shares cached prefixes with requests of the same salt only, None with those that have none.
          only_final: yield the last item alone, which spares the host the others.

        Raises:
          ValueError: the prompt or a parameter is out of range, or the request could never be served.
          EngineClosedError: the engine is shutting down, or was not started.
          EngineDeadError: a step failed, before or during the request.
        """
        stream = await self._enter(prompt, sampling_params, request_id, cache_salt, only_final)
        try:
            finished = False
            while not finished:
                output = await stream.next_output()
                finished = output.finished
                yield output
        finally:
            self._leave(stream)

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step: its reader gets a last item with `finish_reason` "abort".

        Does nothing if there is no such request. May be called from any thread.
        """
        with self._work:
            stream = self._streams.get(request_id)
            if stream is not None:
                self._leavers.append(stream)
                self._work.notify()

    # --- the event loop's side

    async def _enter(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        cache_salt: str | None,
        only_final: bool,
    ) -> _Stream:
        """Puts a request where the step's thread will find it."""
        self._check_open()
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("an AsyncEngine serves the event loop that it was started in, and this is another")
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            prompt = await self._encode(prompt)
            if not prompt:
                raise ValueError(f"prompt={text!r} has no tokens; give at least one")
        self._check_length(prompt)
        with self._work:
            self._check_open()  # again: it may have died while the text was being tokenised
            if request_id is None:
                request_id = next(name for name in self._ids if name not in self._streams)
            elif not isinstance(request_id, str):
                raise ValueError(f"request_id={request_id!r:.80} must be a string")
            elif request_id in self._streams:
                raise ValueError(f"request_id={request_id!r} is in use by a request that still runs; choose another")
            params = SamplingParams() if params is None else params
            stream = _Stream(request_id, text, prompt, params, cache_salt, only_final)
            self._streams[request_id] = stream
            self._arrivals.append(stream)
            self._work.notify()
        return stream

    async def _encode(self, text: str) -> list[int]:
        encode = self.engine.tokenizer.encode
        return encode(text) if len(text) < _LONG_TEXT else await asyncio.to_thread(encode, text)

    def _check_open(self) -> None:
        if self._dead_error is not None:
            raise _dead(self._dead_error)
        if self._closed:
            raise EngineClosedError("the engine is shutting down and takes no new requests")
        if self._thread is None:
            raise EngineClosedError("the engine has not been started; call start() first")

    def _check_length(self, prompt: Prompt) -> None:
        """Refuses what is far too long here: checking a million ids would keep the steps waiting."""
        longest = self.engine.scheduler.config.max_model_len
        if isinstance(prompt, Sequence) and len(prompt) >= longest:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, which leaves no room for output in max_model_len={longest}"
            )

    def _leave(self, stream: _Stream) -> None:
        """Ends a request that nobody reads any more, unless it has ended."""
        with self._work:
            if self._streams.get(stream.request_id) is stream:
                stream.abandoned = True
                self._leavers.append(stream)
                self._work.notify()

    async def _ends_within(self, seconds: float | None) -> bool:
        """Waits for the end of the thread, as any event loop can; whether it has come."""
        done, _ = await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=seconds)
        return bool(done)

    def _abort_all(self) -> None:
        with self._work:
            self._leavers.extend(self._streams.values())
            self._work.notify()

    def _wake_readers(self) -> None:
        with self._work:
            news, self._news = self._news, set()
            self._waking = False
        for stream in news:
            stream.wake()

    # --- the thread that steps the engine

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                self._publish([*self._let_out(), *self._let_in()])
                if self.engine.has_unfinished:
                    advanced = self.engine.step()
                    self._last_step_at = time.monotonic()
                    self._publish(self._note(advanced))
                elif any(stream.completion is not None for stream in self._copy_of_streams()):
                    raise RuntimeError("somebody else steps the engine, and took in the end of a request")
        except BaseException as error:  # whatever it is, readers must hear of it
            self._die(error)
        finally:
            self._idle = True
            self._ended.set_result(None)

    def _copy_of_streams(self) -> list[_Stream]:
        with self._work:
            return list(self._streams.values())

    def _wait_for_work(self) -> bool:
        """Sleeps while there is nothing to do; False if there never will be."""
        with self._work:
            if not self._streams and not self._closed:
                self._idle = True
                while not self._streams and not self._closed:
                    self._work.wait(_IDLE_SECONDS)
                    self._end_with_loop()
                self._last_step_at = time.monotonic()
                self._idle = False
            self._end_with_loop()
            return bool(self._streams)

    def _end_with_loop(self) -> None:
        """Aborts everything once the event loop was closed, since nobody is left to read."""
        assert self._loop is not None, "start() comes first"
        if self._loop.is_closed():
            self._closed = True
            self._leavers.extend(self._streams.values())

    def _let_out(self) -> list[_Stream]:
        """Ends the requests that were aborted or left; returns them."""
        with self._work:
            leavers, self._leavers = self._leavers, []
        for stream in leavers:  # one may be among them twice, or have ended by itself since
            if not stream.ended and stream.completion is None and not stream.abandoned:
                self._add(stream)  # its reader waits for an output that says "abort"
            if not stream.ended:
                self.engine.abort_request(stream.request_id)
                self._end(stream, None if stream.completion is None else stream.output())
        return leavers

    def _let_in(self) -> list[_Stream]:
        """Gives the engine what has arrived, as far as time allows; returns those that it refused."""
        refused = []
        until = time.monotonic() + _LET_IN_SECONDS
        while self._arrivals:
            stream = self._arrivals.popleft()
            if stream.completion is None and not stream.ended:
                self._add(stream)
                if stream.ended:
                    refused.append(stream)
            if time.monotonic() > until:
                break
        return refused

    def _add(self, stream: _Stream) -> None:
        try:
            request = (stream.request_id, stream.prompt, stream.params, stream.cache_salt)
            stream.completion = self.engine.add_request(*request)
        except Exception as error:  # the request's own fault, and its reader's to hear
            self._end(stream, error)

    def _note(self, advanced: Iterable[Completion | BeamCompletion]) -> list[_Stream]:
        """Notes how far requests have come; returns those whose readers are to be woken."""
        news: dict[_Stream, None] = {}
        for completion in advanced:
            request = completion.sequence.request
            stream = self._streams.get(request.request_id)
            if stream is None or stream.completion is None or stream.completion.sequence.request is not request:
                continue
            if stream in news:  # by another of its samples
                continue
            if completion.finish_reason is not None and stream.completion.request_finished:
                self._end(stream, stream.output())
            elif stream.only_final or stream.abandoned:
                continue
            else:
                stream.num_tokens = stream.num_read()
            news[stream] = None
        return list(news)

    def _end(self, stream: _Stream, last: RequestOutput | Exception | None) -> None:
        """Ends a stream by its last output or an error; by neither if nobody reads it.

        The request's id is free before its reader can know.
        """
        with self._work:
            del self._streams[stream.request_id]
        stream.ended = True
        if isinstance(last, Exception):
            stream.error = last
        else:
            stream.last = last

    def _die(self, error: BaseException) -> None:
        logger.error("the engine died", exc_info=error)
        with self._work:
            self._dead_error = error
            self._closed = True
        streams = self._copy_of_streams()
        for stream in streams:
            with contextlib.suppress(Exception):  # a failed step has ended them; what else failed may not
                self.engine.abort_request(stream.request_id)
            self._end(stream, _dead(error))
        self._publish(streams)

    def _publish(self, news: Sequence[_Stream]) -> None:
        """Has the readers of these streams woken, by one call of the event loop however many they are."""
        if not news:
            return
        with self._work:
            self._news.update(news)
            waking, self._waking = self._waking, True
        if not waking:
            self._call_in_loop(self._wake_readers)

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # it was closed without shutdown()
            with self._work:
                self._end_with_loop()


class _Stream:
    """A request between the two threads."""

    def __init__(
        self,
        request_id: str,
        text: str | None,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str | None,
        only_final: bool,
    ) -> None:
        """Args: `text` is the prompt as it was given, if as text; `prompt` its token ids."""
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.cache_salt = cache_salt
        self.only_final = only_final
        self.completion: Completion | None = None
        """Once the engine has the request."""
        self.num_tokens = 0
        """Output tokens after the last step that brought one."""
        self.last: RequestOutput | None = None
        """The last output, once the request has ended."""
        self.error: Exception | None = None
        """Why there will be no last output."""
        self.ended = False
        """Whether the engine is done with the request."""
        self.abandoned = False
        """Whether its reader has gone."""
        self.waiter: asyncio.Future[None] | None = None
        self._text = text
        self._num_seen = 0  # tokens of the reader's last output

    def output(self) -> RequestOutput:
        """The request as far as it has come."""
        assert self.completion is not None, "the engine does not have it yet"
        output = self.completion.output()
        return output if self._text is None else dataclasses.replace(output, prompt=self._text)

    def num_read(self) -> int:
        """Output tokens that the engine has read so far."""
        assert self.completion is not None, "the engine does not have it yet"
        return self.completion.num_read

    async def next_output(self) -> RequestOutput:
        """The newest output, once there is one that was not read yet; or raises what ended the request."""
        while True:
            if self.error is not None:
                raise self.error
            if self.last is not None:
                return self.last
            if self.num_tokens > self._num_seen and (output := self._whole_output()) is not None:
                self._num_seen = sum(len(completion.token_ids) for completion in output.outputs)
                return output
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def _whole_output(self) -> RequestOutput | None:
        """The output of the noted state, made beside the step's thread; None if that was just changing it.

        A completion changes when a token is read, which the sequence gets first, or when it is aborted, which its
        `finish_reason` tells first: a state with the noted number of tokens where nothing was aborted is whole. (The
        last state comes by itself.) If it is not, the reader will be woken in a moment, since what changes is news.
        """
        noted = self.num_tokens
        output = self.output()
        aborted = any(completion.finish_reason == "abort" for completion in output.outputs)
        return output if noted == self.num_read() and not output.finished and not aborted else None


def _dead(error: BaseException) -> EngineDeadError:
    dead = EngineDeadError(f"the engine died and serves no more requests: {type(error).__name__}: {error}")
    dead.__cause__ = error
    return dead
