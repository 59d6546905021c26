from benchmark.demo.model import main

if __name__ == "__main__":
    raise SystemExit(main())
