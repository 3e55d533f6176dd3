from anaphora.cli import main

main()
