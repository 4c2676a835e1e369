"""Generated code of the wire's protobuf messages. `make protos` writes the `*_pb2` files; nobody edits them."""
