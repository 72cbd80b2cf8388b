"""The disk tier below SGLang's host memory (HiCache). Code that other engines share belongs to `connectors`."""
