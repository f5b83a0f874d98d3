"""A trainer that pauses the mesh, goes as far as a phase of an update of its weights, says so, and waits to be killed.

python dying_trainer.py FOLDER_OF_EXAMPLES URL BACKEND PORT MODEL PHASE
"""

import importlib
import sys
import threading
import time
from typing import Any


def main() -> None:
    examples, url, backend, port, model, phase = sys.argv[1:]
    sys.path.insert(0, examples)
    import httpx

    weight_sender: Any = importlib.import_module("weight_sender")
    from safetensors.torch import load_file

    def reached(name: str) -> None:
        if name == phase:
            print(f"at {name}", flush=True)
            while True:
                time.sleep(3600)

    httpx.post(f"{url}/pause?mode=keep", timeout=60).raise_for_status()
    if phase == "meeting":  # it serves its store, and never makes the group

        def meet(self: object, size: int, listening: object) -> None:
            reached("meeting")

        weight_sender.GlooSender._meet = meet
    made = weight_sender.MemorySender(url) if backend == "ipc" else weight_sender.GlooSender(url, int(port))
    reached("joined")
    parts = list(weight_sender.buckets(load_file(f"{model}/model.safetensors").items(), 10_000))
    made.mesh.post("/start_weight_update", {})
    reached("started")
    for nth, part in enumerate(parts):
        told = weight_sender.told(part)
        if backend == "ipc":
            path = f"/dev/shm/test-{port}"
            with open(path, "wb") as file:
                file.write(weight_sender.as_bytes(part).numpy().tobytes())
            told["buckets"] = [{"name": path.rpartition("/")[2], "count": len(part)}]
            made.mesh.post("/update_weights", {"update_info": told})
        else:
            told["packed"] = True
            asked = threading.Thread(
                target=made.mesh.post, args=("/update_weights", {"update_info": told}), daemon=True
            )
            asked.start()
            if nth:
                reached("sending")
            made._group.broadcast(weight_sender.as_bytes(part), 0).wait()
            asked.join()
        if nth == len(parts) // 2:
            reached("half")
    reached("sent")
    made.mesh.post("/finish_weight_update", {"weight_version": "dead"})
    reached("finished")


if __name__ == "__main__":
    main()
