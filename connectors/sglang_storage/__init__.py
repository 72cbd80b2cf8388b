"""The disk tier below SGLang's host memory (HiCache). Code that other connectors use too belongs to `connectors`."""
