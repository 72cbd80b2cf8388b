"""EngineFrames: the frames of kvtier's own engines as the port takes them."""

from kvtier.engine.attached.wire import Frames


class EngineFrames(Frames):
    """See `Framing`: each message is the bytes of one frame. The framing itself says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.to_send = bytearray()
