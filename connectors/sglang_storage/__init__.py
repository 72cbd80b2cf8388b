"""The disk tier below SGLang's host memory (HiCache). Code shared with other connectors is in `connectors`."""
