"""trl's VLLMClient, unchanged: what it asks of a mesh, and weights that it sends. `python PROGRAM URL MODEL PORT`.

It needs vLLM for its own end of the broadcasts, which are NCCL's: a stand-in sends them over gloo, to a mesh with the backend gloo.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
import types


def stand_in() -> None:
    """vLLM's modules that the client imports, of the release that it knows last."""
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    limit = datetime.timedelta(seconds=60)

    class Communicator:
        def __init__(self, info: dict) -> None:
            store = TCPStore(
                info["master_address"], info["master_port"], info["world_size"], True, limit, use_libuv=False
            )
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=info["master_address"])]
            options._timeout = limit
            self._gloo = ProcessGroupGloo(PrefixStore("gloo", store), 0, info["world_size"], options)
            self.group = types.SimpleNamespace(store=store, socket=None)

        def broadcast(self, tensor: torch.Tensor, src: int) -> None:
            self._gloo.broadcast([tensor], torch.distributed.BroadcastOptions()).wait()

    def packed(iterator, group, src, post_iter_func, buffer_size_bytes=1 << 30, num_buffers=2) -> None:
        parts, size = [], 0
        for item in iterator:
            parts.append(post_iter_func(item).contiguous().view(torch.uint8).view(-1))
            size += parts[-1].numel()
            if size > buffer_size_bytes:
                group.broadcast(torch.cat(parts), src)
                parts, size = [], 0
        if parts:
            group.broadcast(torch.cat(parts), src)

    modules = {
        "vllm": {"__version__": "0.30.0", "__file__": __file__},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": Communicator},
        "vllm.distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": packed},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(members)
        sys.modules[name] = module
    folder = importlib.util.find_spec("trl").submodule_search_locations[0]
    for name in ("trl", "trl.generation"):  # whose own modules want all that trainers need
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(pathlib.Path(folder, *name.split(".")[1:]))]
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.30.0" if name == "vllm" else real(name)


def main() -> None:
    url, folder, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    stand_in()
    import transformers
    from trl.generation.vllm_client import VLLMClient

    prompts = [[3, 10, 17, 24], [5, 6, 7]]
    client = VLLMClient(base_url=url, group_port=port, connection_timeout=60)
    assert client.get_world_size() == 2
    assert client.get_server_info()["weight_transfer_config"] == {"backend": "gloo"}
    told = []

    def generate() -> None:
        found = client.generate(prompts, max_tokens=8, temperature=0.0, generation_kwargs={"ignore_eos": True})
        assert found["prompt_ids"] == prompts
        assert [[one[0] for one in ids] for ids in found["logprob_token_ids"]] == found["completion_ids"]
        told.append(found["completion_ids"])

    generate()
    sampled = client.generate(prompts, n=3, max_tokens=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=2)
    assert len(sampled["completion_ids"]) == 6
    scored = client.get_sequence_logprobs([[3, 10, 17, 24], [5, 6, 7, 8]], [2, 3], top_logprobs=2)
    assert [len(one) for one in scored["logprobs"]] == [2, 1]

    client.init_communicator(device="cuda")  # the client takes no other; nothing of CUDA is asked for without a number
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    client.update_model_params(model)
    client.reset_prefix_cache()
    generate()
    with client.weight_update():
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data * 0.5 if "norm" in name else parameter.data)
    generate()
    refused = ""
    try:
        client.update_named_param(*next(iter(model.named_parameters())))
    except Exception as error:
        refused = str(error)
    assert "missing" in refused, refused
    generate()
    client.close_communicator()
    print(json.dumps(told))


main()
