# SPDX-License-Identifier: Apache-2.0
# docker build -t vescale . && docker run --rm vescale
FROM python:3.11-slim
WORKDIR /vescale
COPY constraints.txt ./
COPY packages/vescale-dtensor packages/vescale-dtensor
COPY packages/vescale-fsdp packages/vescale-fsdp
RUN pip install --no-cache-dir -c constraints.txt \
    ./packages/vescale-dtensor "./packages/vescale-fsdp[plot,rich]"
COPY examples examples
CMD ["python", "examples/train_lm.py", "--nproc", "2", "--optimizer", "muon", "--compare", \
     "--output-dir", "runs/demo", "--checkpoint-dir", "runs/demo/checkpoint"]
