# An image for launch/gke.sh and launch/ray.sh. Choose the extras of pyproject.toml:
#   docker build --tag IMAGE .                                       TPU
#   docker build --tag IMAGE --build-arg EXTRAS=gpu,data,gcs .       GPU
#   docker build --tag IMAGE --build-arg EXTRAS=cluster,data,gcs .   corpora, with Ray
# CUDA comes with the extra `gpu`, and libtpu with `tpu`: the host only needs its driver.
FROM python:3.12-slim-bookworm
ARG EXTRAS=tpu,data,gcs
WORKDIR /opt/bert_jax
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY bert_jax ./bert_jax
COPY configs ./configs
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"
# No ENTRYPOINT and no shell: gke.sh gives the command, which gets SIGTERM itself and then saves.
CMD ["bert-jax", "--help"]
