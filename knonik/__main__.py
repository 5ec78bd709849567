from knonik.cli import main

main()
