# The publisher image: a sidecar, an init container or a one-shot job beside a training container.
#
#   docker build -t dispatch-agent .
#
# It runs as any user, with a read-only root and without a shell. The first stage leaves behind what only building needs.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# The stores that it can speak to besides folders; another package of fsspec's family may be named here too.
ARG EXTRAS=s3
ARG MORE_PACKAGES=
WORKDIR /src
RUN python3 -m venv /opt/dispatch-agent
COPY pyproject.toml README.md LICENSE ./
COPY tests/constraints.txt tests/
COPY agent agent
COPY prologue prologue
# Not visible to PYTHONPATH and to a user's site-packages: `-I`, and an environment of its own. Of botocore's descriptions
# of 400 services, the publisher speaks to the store and to those that give credentials for it.
RUN cd /opt/dispatch-agent \
 && bin/pip install --no-cache-dir --disable-pip-version-check -c /src/tests/constraints.txt "/src${EXTRAS:+[${EXTRAS}]}" ${MORE_PACKAGES} \
 && sed -i '1s/$/ -I/' bin/dispatch-agent bin/publish \
 && find lib/python3*/site-packages/botocore/data -mindepth 1 -maxdepth 1 -type d \
      ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -r {} + \
 && bin/python -m pip uninstall --quiet --yes pip setuptools

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/dispatch-agent /opt/dispatch-agent
RUN ln -s /opt/dispatch-agent/bin/dispatch-agent /opt/dispatch-agent/bin/publish /usr/local/bin/
# A number: a cluster that refuses root must see that it is none.
USER 65532:65532
ENTRYPOINT ["/opt/dispatch-agent/bin/dispatch-agent"]
