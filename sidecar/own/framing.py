"""EngineFrames: the port's framing for the frames of kvtier's own engines."""

from kvtier.engine.attached.wire import Frames


class EngineFrames(Frames):
    """A framing (see `Framing`) whose messages are the bytes of one frame each. The framing itself sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.to_send = bytearray()
