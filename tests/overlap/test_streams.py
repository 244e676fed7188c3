"""Events order what must be ordered on a device, and leave beside each other what may run so; without a device."""

from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from stretto.overlap.staged import DeviceCopies
from stretto.overlap.streams import Made, Worker, made
from stretto.overlap.wires import Nccl
from tests.overlap.streams_that_remember import DEVICE, Communicator, Memory, Stream, in_place_of_torch


def test_a_copy_out_follows_the_product_that_was_queued_and_no_later_one() -> None:
    with in_place_of_torch() as cuda:
        copies, tensor, buffer = DeviceCopies(DEVICE), Memory(cuda, "partial"), Memory(cuda, "buffer")
        cuda.default.do("product 0")
        copied: Any = copies.leave(tensor, buffer)
        after = cuda.default.do("product 1")
    assert buffer.after == {"product 0"}
    assert "partial to buffer" in copied.before
    assert copied.options == {"blocking": True}, "the thread that waits for it must not spin"
    assert after == {"product 0"}, "products wait for no copy out"


def test_a_copy_in_runs_beside_the_product_that_was_queued_since_it_was_posted() -> None:
    with in_place_of_torch() as cuda:
        copies, tensor, buffer = DeviceCopies(DEVICE), Memory(cuda, "room"), Memory(cuda, "buffer")
        cuda.default.do("last use of the room's memory")
        mark = copies.mark()
        cuda.default.do("product 1")
        other = Stream()
        with cuda.stream(other):
            copies.enter(buffer, tensor, mark)
        assert tensor.after == {"last use of the room's memory"}
        assert "buffer to room" in other.do("product on the arrived")
        assert "buffer to room" in cuda.default.do("next use of the room's memory")


def test_nccl_messages_run_beside_the_products_between_their_posting_and_their_settling() -> None:
    with in_place_of_torch() as cuda:
        options = mock.Mock()
        nccl = mock.Mock(side_effect=lambda *given: Communicator(cuda, *given), Options=options)
        with mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True):
            wire = Nccl(dist.HashStore(), 1, 2, DEVICE, timedelta(seconds=7))
        backend: Any = wire._backend
        assert options.call_args.kwargs == {"is_high_priority_stream": True}
        assert backend.given[1:] == (1, 2, options.return_value)
        assert backend.given[3]._timeout == timedelta(seconds=7)
        assert ("eager_connect_single_device", DEVICE) in backend.calls, "before a batch of some ranks only"
        a, b = torch.zeros(1), torch.zeros(1)
        cuda.default.do("product 0")
        (work,) = wire.post([("receiving from", a, 0), ("sending to", b, 0)])
        assert [name for name, *_ in backend.calls][-4:] == ["_start_coalescing", "recv", "send", "_end_coalescing"]
        assert "product 0" in backend.own.before
        assert "message 1" not in cuda.default.do("product 1")
        wire.end(work)
        other = Stream()
        with cuda.stream(other):
            wire.settle(work)
        assert "message 1" in other.do("product on the arrived")
        assert "message 1" in cuda.default.do("next use of its memory")
        assert "product 1" not in backend.own.before
        moment: Any = wire.end_of(work)
        assert "message 1" in moment.before
        assert moment.options == {"enable_timing": True}
        wire.hang_up()
        assert ("abort",) in backend.calls


def test_a_worker_goes_on_from_its_starters_stream_and_hands_back_what_it_made() -> None:
    seen: dict[str, Any] = {}
    with in_place_of_torch() as cuda:
        worker, late = Worker("test"), Future()
        gradient, piece, result = (Memory(cuda, name) for name in ("gradient", "piece", "result"))

        def reduce(given: Any) -> Any:
            stream = cuda.current_stream()
            assert given is gradient
            assert late.result().take() is piece
            seen["stream"], seen["after"] = stream, stream.do("sum")
            return result

        given = made(gradient)  # type: ignore[arg-type]
        cuda.default.do("backward 0")
        future: Future[Made] = worker.submit(DEVICE, reduce, given)
        cuda.default.do("rows of a late piece")
        late.set_result(made(piece))  # type: ignore[arg-type]
        cuda.default.do("backward 1")
        arrived = future.result()
        assert "sum" not in cuda.default.do("backward 2")
        assert arrived.take() is result
        assert "sum" in cuda.default.do("the optimizer's step")
        worker.shutdown()
    assert seen["stream"] is not cuda.default
    assert seen["after"] == {"backward 0", "rows of a late piece"}
    assert gradient.used_on == piece.used_on == [seen["stream"]]
    assert result.used_on == [cuda.default]
