# An image in which agents run, for a user who is not root: docs/kubernetes.md, "Containers".
#
#   docker build -t shoal-train .
#
# Build arguments: PYTHON_VERSION; TORCH_INDEX, a package index of torch's builds (CPU by default, which is smaller by
# gigabytes); EXTRAS, as in pip install 'shoal[tls,zstd]'. Nothing here is of one architecture: docker buildx build
# --platform linux/amd64,linux/arm64 makes both.
ARG PYTHON_VERSION=3.13
FROM python:${PYTHON_VERSION}-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=tls,zstd
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
RUN python -m venv /opt/shoal
WORKDIR /src
# torch first, in a layer of its own: it is large, and changes rarely.
COPY constraints.txt ./
RUN /opt/shoal/bin/pip install --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN /opt/shoal/bin/pip install --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" ".[${EXTRAS}]"

FROM python:${PYTHON_VERSION}-slim
COPY --from=build /opt/shoal /opt/shoal
ENV PATH=/opt/shoal/bin:$PATH PYTHONUNBUFFERED=1
# By number, so that Kubernetes' runAsNonRoot can tell that it is not root.
RUN useradd --uid 10001 --create-home agent
USER 10001:10001
WORKDIR /work
# No entrypoint: `shoal run`, `torchrun` and `python` are equally good commands.
CMD ["shoal", "doctor"]
