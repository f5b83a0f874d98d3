"""The processes of this host: spawning and watching them, their directories, and which incarnation has which place."""
