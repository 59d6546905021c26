FROM lmsysorg/sglang:v0.5.23

COPY . /opt/sgl-vase
# The image holds the pinned SGLang already; --no-deps keeps its CUDA build of torch and the kernels.
RUN python3 -m pip install --no-cache-dir --no-deps --break-system-packages /opt/sgl-vase

ENTRYPOINT ["python3", "-m", "sglang.launch_server", "--host", "0.0.0.0"]
CMD ["--help"]
