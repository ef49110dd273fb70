"""The kinds of servers on which a buffer may be."""

from rollq.buffer.store.embedded_cluster import EmbeddedCluster
from rollq.buffer.store.embedded_server import EmbeddedServer

AnyServer = EmbeddedServer | EmbeddedCluster
