# One node of a Headway cluster, or a client: docs/rented.md#containers.
#   docker build -t headway .                                                     torch with CUDA
#   docker build -t headway --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# All nodes of a cluster need one release of Python, torch and numpy, so both stages have one base.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
ARG TORCH_INDEX=https://pypi.org/simple
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/headway
WORKDIR /src
# torch first: it changes seldom, and its layer is the largest.
COPY constraints.txt ./
RUN /opt/headway/bin/pip install -c constraints.txt --index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE ./
COPY api api
COPY daemon daemon
COPY docs/examples docs/examples
COPY docs/jobs docs/jobs
COPY optim optim
COPY proto proto
COPY stages stages
COPY systemd systemd
RUN /opt/headway/bin/pip install -c constraints.txt '.[data,http,node,quantized,s3]'

FROM python:${PYTHON}
COPY --from=build /opt/headway /opt/headway
# A number, so that an orchestrator can see that it is not root. Give checkpoints on a shared file system to this number.
RUN useradd --system --uid 10001 --home-dir /var/lib/headway --create-home headway
ENV PATH=/opt/headway/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/headway
VOLUME /var/lib/headway
# No HEALTHCHECK: the node's lease in etcd is one already, and an orchestrator that kills a node for a slow answer would
# cost batches. SIGTERM drains; give it more time than stop_timeout_s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["headway"]
CMD ["daemon", "--config", "/etc/headway/daemon.toml"]
