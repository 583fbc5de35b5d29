# The publisher image: a sidecar, an init container or a one-shot job beside a training container.
#
#   docker build -t dispatch-agent .
#
# It holds one folder, which needs nothing around it: our package, a Python, the C library. No shell, no installer.
# It runs as any user and with a read-only root; `dispatch-agent install DIR` copies the folder into a volume, from
# where it runs in any other image. Made for the architecture that it is built on.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends binutils ca-certificates gcc musl-tools patchelf \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY images/publisher images/publisher
RUN musl-gcc -static -Os -s -Wall -Wextra -Werror -D_GNU_SOURCE -o /launch images/publisher/launch.c
COPY pyproject.toml README.md LICENSE ./
COPY tests/constraints.txt tests/
COPY agent agent
COPY prologue prologue
# The stores that it can speak to besides folders, and YAML for `render` and `inspect`. MORE_PACKAGES may name another
# package of fsspec's family.
ARG EXTRAS=s3,kubernetes
ARG MORE_PACKAGES=
RUN PIP_CONSTRAINT=/src/tests/constraints.txt python3 images/publisher/make_tree.py \
      /image/opt/dispatch-agent /launch "/src${EXTRAS:+[${EXTRAS}]}" ${MORE_PACKAGES}
# What a system must have: a name for the user, a place for temporary files, certificates where others look for them.
RUN cd /image && mkdir -p etc/ssl/certs usr/local/bin && install -d -m 1777 tmp \
 && ln -s /opt/dispatch-agent/bin/dispatch-agent /opt/dispatch-agent/bin/publish usr/local/bin/ \
 && ln -s /opt/dispatch-agent/etc/ca-certificates.crt etc/ssl/certs/ \
 && echo 'dispatch:x:65532:65532::/tmp:/nonexistent' >etc/passwd \
 && echo 'dispatch:x:65532:' >etc/group \
 && echo 'hosts: files dns' >etc/nsswitch.conf

FROM scratch
LABEL org.opencontainers.image.title="dispatch-agent" \
      org.opencontainers.image.description="Gives executions an identity and publishes their checkpoints, stale-proof" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /image /
ENV PATH=/usr/local/bin
# A number: a cluster that refuses root must see that it is none.
USER 65532:65532
ENTRYPOINT ["/opt/dispatch-agent/bin/dispatch-agent"]
# Of a `watch` that listens; Kubernetes has probes of its own and does not read it.
HEALTHCHECK CMD ["dispatch-agent", "health", "live"]
