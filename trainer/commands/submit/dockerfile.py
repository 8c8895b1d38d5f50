"""The Dockerfile of `submit dockerfile`."""

DOCKERFILE = """\
# An image with this program, built in its folder:
#   python -m trainer submit dockerfile > Dockerfile
#   docker build -t REGISTRY/trainer:1 . && docker push REGISTRY/trainer:1
FROM python:3.12-slim
COPY pyproject.toml README.md LICENSE /trainer/
COPY recipes /trainer/recipes
COPY trainer /trainer/trainer
# torch from the package index brings CUDA; the host needs only the driver of its GPUs.
RUN pip install --no-cache-dir '/trainer[timm]' && rm -r /trainer
ENV PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["python", "-m", "trainer"]
"""
