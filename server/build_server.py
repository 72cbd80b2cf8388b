"""build_server: creates and connects all parts of a server of `kvtier serve`."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncio_extras import call_in_executor

from kvtier.engine.config import Config
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.engine.thread_work import guarded
from kvtier.server.entrance import Entrance
from kvtier.server.http_server import HttpServer
from kvtier.server.loading_app import LoadingApp
from kvtier.server.served_models import ServedModels
from kvtier.web.api_keys import ApiKeys, with_tenant_names
from kvtier.web.log_lines import redirect_libraries
from kvtier.web.operating.routes import Operating

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvtier.server.serving_app import ServingApp


def build_server(
    model: "str | Path | PreTrainedModel",
    config: Config,
    bound: socket.socket,
    model_name: str,
    keys: ApiKeys | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    operating: Operating | None = None,
    shows_bars: bool = False,
) -> HttpServer:
    """Return a server of *model*. Requests use the name *model_name*. The model is loaded when the server runs.

    *operating* carries out operators' requests, such as evicting blocks; None disables them. With *shows_bars*,
    transformers shows progress bars on stderr while it loads the weights. Raises ValueError if an adapter has the same
    name as the model.
    """
    if model_name in config.lora:
        raise ValueError(
            f"lora {model_name}: the model itself has this name; give the model or the adapter another one"
        )
    entrance = Entrance(config.server, keys, operating, Tracer.of(config.tracing, "kvtier"))
    models = ServedModels(model_name, tuple(config.lora), int(time.time()), longest_request=None)
    loading = LoadingApp(entrance, models)

    async def load() -> "ServingApp":
        # The import takes seconds. It runs in a thread, so that the server answers requests and signals meanwhile.
        loading.set_stage("importing torch and transformers")
        executor = ThreadPoolExecutor(1)
        importing = call_in_executor(guarded(partial(_import_engine, shows_bars)), executor=executor)
        executor.shutdown(wait=False)  # the thread ends after the import, even if this task is cancelled
        await importing
        from kvtier.server.serving_app import load_app

        return await load_app(model, tokenizer, with_tenant_names(config, keys), models, entrance, loading.set_stage)

    return HttpServer(bound, entrance, loading, load)


def _import_engine(shows_bars: bool) -> None:
    from transformers.utils import logging as transformers_log

    redirect_libraries()
    if not shows_bars:  # in a log file a progress bar is one endless line
        transformers_log.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
