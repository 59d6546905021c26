import sys

from sgl_vase_srt.compat.page import main

sys.exit(main(sys.argv[1:]))
