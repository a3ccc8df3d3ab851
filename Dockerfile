# FedVL for a server or a party of a federation; compose.yaml starts three hospitals with it.
# No image, key, run or setting of anybody is in it: .dockerignore lets only the program in.
# A tag can change; to build from the same image each time, give its digest: --build-arg BASE=python:3.11-slim@sha256:...
ARG BASE=python:3.11-slim
FROM ${BASE}

# A build for processors. For a GPU: --build-arg TORCH_OPTIONS= (the usual index has builds with CUDA), and device = "cuda".
ARG TORCH_OPTIONS="--index-url https://download.pytorch.org/whl/cpu"

WORKDIR /opt/fedvl
COPY constraints.txt ./
RUN pip install --no-cache-dir torch==2.13.0 ${TORCH_OPTIONS}
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[flower,serve,privacy,parquet,heic,dicom]" -c constraints.txt
COPY tools/three_hospitals.py tools/

# /own is what a party or the server has, /post what travels between them; volumes take their owner from here.
RUN useradd --create-home --uid 1000 fedvl && mkdir -p /own /post/a /post/b /post/c && chown -R fedvl:fedvl /own /post
USER fedvl
WORKDIR /own
ENV FEDVL_CACHE=/own/cache
ENTRYPOINT ["fedvl"]
CMD ["--help"]
