"""Publishing tensors that are made one by one: manifests, name maps, ranks in step, staging from a GPU.

`Publisher.publish_stream` is the way in; nothing here is used without it.
"""
