"""A worker's placement in the mesh: its part of the model, its GPU, and how it gets to know the rest of its group."""

import torch

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Epoch
from meshlm.workers.distributed.communicator import SINGLE_RANK, Communicator, set_environment
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.membership import Meeting, MeetingSpot, Membership, meet
from meshlm.workers.distributed.shard import WHOLE, Shard


class WorkerPlacement:
    """`number` counts the workers of this node; with several, GPUs are dealt out in this order."""

    def __init__(
        self,
        shard: Shard = WHOLE,
        number: int = 0,
        membership: Membership | None = None,
        meeting: Meeting | None = None,
        interface: str | None = None,
        *,
        custom_all_reduce: bool = True,
        data_parallel: tuple[int, int] = (0, 1),
        spot: MeetingSpot | None = None,
    ) -> None:
        """data_parallel: its rank, and how many there are. spot: where ranks on several hosts meet that share experts."""
        self._spot = spot
        self._data_parallel = data_parallel
        self.shard, self._number, self._membership, self._meeting = shard, number, membership, meeting
        self._interface = interface  # by which the other hosts of its group are reached; None: all of it is here
        self._custom_all_reduce = custom_all_reduce

    @classmethod
    def of(cls, config: MeshConfig, worker: int, membership: Membership) -> "WorkerPlacement":
        """The placement of worker number `worker` of the mesh."""
        parallel, node = config.parallel, config.node
        whole, redundant = config.experts.enable_expert_parallel, config.experts.num_redundant_experts
        shard = Shard.of_worker(parallel, worker, expert_parallel=whole, num_redundant=redundant)
        number = worker - (node.workers[0] if node else 0)
        rank = worker // parallel.workers_per_rank
        peers, ranks = not parallel.disable_custom_all_reduce, (rank, parallel.data_parallel_size)
        spot = None
        if node is not None and config.steps_over_nodes:
            address = parallel.master_addr, parallel.step_ports[0]
            spot = MeetingSpot(address, node.interface, keeps=worker == 0)
        if node is None or len(parallel.nodes_of(rank)) == 1:
            meeting = Meeting(shard.rank, config.run.run_dir)
            return cls(shard, number, membership, meeting, custom_all_reduce=peers, data_parallel=ranks, spot=spot)
        meeting = Meeting(shard.rank, config.run.run_dir, (parallel.master_addr, parallel.master_port + rank))
        return cls(
            shard, number, membership, meeting, node.interface, custom_all_reduce=peers, data_parallel=ranks, spot=spot
        )  # fmt: skip

    def take_gpu(self) -> torch.device:
        """This thread computes on the placement's GPU from now on (of those that CUDA_VISIBLE_DEVICES shows)."""
        device = torch.device("cuda", self._number % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def experts(self, device: torch.device) -> ExpertGroup:
        """The workers with which this one shares experts across data-parallel ranks; they meet later (LockstepEngine.join)."""
        return ExpertGroup(*self._data_parallel, str(self.shard.tp_rank), device, self._spot)

    def stage(self, device: torch.device) -> ExpertGroup:
        """The tensor-parallel ranks, whose experts move between them. After `connect`; collective. StepAborted."""
        assert self._membership is not None and self._meeting is not None  # noqa: PT018
        name = "-".join(f"{incarnation:x}" for incarnation in self._membership.committed or ())
        group = ExpertGroup(self.shard.tp_rank, self.shard.tp_size, name, device)
        group.connect(self._meeting.run_dir, Epoch(0))
        return group

    def connect(self, device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Communicator:
        """Meet the other workers of the group. Blocks; collective. What is summed is [up to `tokens`, hidden]."""
        if self.shard.size == 1:
            return SINGLE_RANK
        from meshlm.workers.distributed.communicator import connect

        assert self._membership is not None and self._meeting is not None  # noqa: PT018
        if self._spot is not None:  # what is set first stays
            set_environment(self._spot.interface)
        store = meet(self._membership, self._meeting)
        widest, peers = (tokens, hidden), self._custom_all_reduce
        return connect(store, self.shard, device, dtype, widest, self._interface, custom_all_reduce=peers)
